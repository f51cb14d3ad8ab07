"""Whether ranks see the store of the driver, found out before anything is trained (driver, rank)."""

from __future__ import annotations

import contextlib
import posixpath
import uuid
from collections.abc import Iterator
from typing import Any

from tritium.errors import BadSetting, StoreFailed


@contextlib.contextmanager
def marked(store: Any, run_id: str) -> Iterator[str | None]:
    """Keep a small file in the run's path within the block, and give its path; None where runs are not kept.

    Raises BadSetting where the store can't be written.
    """
    if not store.saving_runs():
        yield None
        return
    path = posixpath.join(store.get_run_path(run_id), f".driver-{uuid.uuid4().hex}")
    try:
        store.write_text(path, "The driver wrote this, and removes it when the training has ended.")
    except Exception as error:
        raise BadSetting(
            f"The store can't be written at {path}: {type(error).__name__}: {error}", setting="store"
        ) from error
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            store.fs.rm_file(store.get_localized_path(path))


def check_reached(store: Any, mark: str | None, host: str) -> None:
    """Raise StoreFailed where this process does not see the file that the driver wrote."""
    if mark is None:
        return
    try:
        seen, why = store.exists(mark), "what the driver has written is not there"
    except Exception as error:  # noqa: BLE001 (every file system of fsspec has its own)
        seen, why = False, f"{type(error).__name__}: {error}"
    if not seen:
        raise StoreFailed(
            f"The store {store.prefix_path} of the driver can't be reached on host {host}: {why}. Use a path that all "
            "machines share (a mounted file system, s3://…, hdfs://…), or Store.create(…, save_runs=False).",
            path=store.prefix_path,
        )
