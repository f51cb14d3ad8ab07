"""File systems by fsspec (any process)."""

from __future__ import annotations

from typing import Any


def opened(url: str, *, shared: bool = False) -> tuple[Any, str]:
    """Return an fsspec file system for a path or URL, and the path in it. To write, it must not be `shared`.

    fsspec has one instance of a store for all code of a thread. While that instance is in a transaction, a file that is
    written through it, by any thread, appears only when the transaction ends. Lightning's ModelCheckpoint makes one for
    each save, which a checkpoint that is written in the background then waits for. So what writes has its own.

    shared : the instance that others use, too. Less work, as a new one connects to its store again.
    """
    import fsspec  # type: ignore[import-untyped]

    files, path = fsspec.core.url_to_fs(url, skip_instance_cache=not shared)
    return files, str(path)


def read(url: str) -> bytearray:
    """Return a whole file.

    Not through the shared instance: where the user has listed the directory, that may give the size of an older file.
    """
    files, path = opened(url)
    with files.open(path, "rb") as file:
        return bytearray(file.read())
