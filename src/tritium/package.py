"""This package as a zip of bytecode, which travels to executors (driver; made once, and kept for later processes)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import importlib.util
import inspect
import io
import lzma
import marshal
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tritium.errors import TritiumError

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

CACHE = "TRITIUM_CACHE"
"""The environment variable with the directory for zips; "": none is kept."""
OURS = ("tritium", "tritium_compat", "tritium_flyte")
"""This package, and those that build on it."""
_PACKAGES = (*OURS, "cloudpickle")
_ON_THE_DRIVER = (
    "tritium/cli",
    "tritium/data/profiling/profile.py",
    "tritium/gang/driver/address.py",
    "tritium/gang/driver/bad_rows.py",
    "tritium/gang/driver/on_cluster.py",
    "tritium/gang/driver/spark_job.py",
    "tritium/gang/driver/told.py",
    "tritium/integration/page.py",
    "tritium/ml/fitting.py",
    "tritium/mlflow.py",
    "tritium/observe/notebook.py",
    "tritium/observe/scoring.py",
    "tritium/observe/timeline.py",
    "tritium/observe/whole_steps.py",
    "tritium/predict/check.py",
    "tritium/predict/dedupe.py",
    "tritium/predict/explain.py",
    "tritium/predict/fingerprints.py",
    "tritium/predict/http.py",
    "tritium/predict/into.py",
    "tritium/predict/ledger.py",
    "tritium/predict/query_run.py",
    "tritium/predict/targets.py",
    "tritium/spark/cluster",
    "tritium/spark/inside/batch_bytes.py",
    "tritium/spark/inside/hangs.py",
    "tritium/spark/memory.py",
    "tritium/spark/inside/partitions.py",
    "tritium/spark/inside/pods.py",
    "tritium/spark/inside/profiles.py",
    "tritium/spark/inside/scheduler.py",
    "tritium/spark/inside/tasks.py",
    "tritium/spark/progress.py",
    "tritium/spark/sources.py",
    "tritium/tensorboard.py",
    "tritium/ui",
    "tritium_compat/horovodrun.py",
    "tritium_flyte/driver",
)
"""Folders and files that no executor needs, and nothing imports that executors do."""
_KEPT = 8
"""Zips in that directory: of several versions of Tritium and of Python."""
# The same sources always make the same zip.
_STAMP = (2020, 1, 1, 0, 0, 0)
# By the byte before (lc) and not by the place in a word (pb): 0.4 % smaller, for nothing.
_LZMA = {"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 4, "lp": 0, "pb": 0}


@functools.cache
def zipped() -> bytes:
    """Return this package, those that build on it where they are installed, and cloudpickle as a zip of bytecode.

    It is compressed as a whole, by LZMA: two thirds of what zlib takes, unpacked in 50 ms, once in a worker of Spark's.

    Driver and executors run the same version of Python, or Spark refuses the job. From 1000 KiB on, Spark would warn at
    each launch that it broadcasts a large task: so docstrings, asserts, the columns of instructions (a fifth of it all)
    and what only the driver needs (its shell's commands, Flyte's tasks) are left out. cloudpickle is included because
    executors may lack it, or have another version than the one that pickled here.

    To make it takes 2 to 4 s. It is kept for other processes of this user with the same sources, in the directory
    `$TRITIUM_CACHE`, or else `tritium` in the user's directory for caches.
    """
    if (mounted := getattr(sys.modules["tritium"], "__archive__", None)) is not None:
        return bytes(mounted)
    sources = dict(_sources())
    key = _key(sources)
    if (kept := _kept(key)) is not None:
        return kept
    archive = lzma.compress(_compiled(sources), filters=[_LZMA])
    _keep(key, archive)
    return archive


def _compile_all() -> None:
    """Read sources by name from stdin, and write their code to stdout. Runs in a Python of its own."""
    sources = marshal.load(sys.stdin.buffer)
    codes = {name: marshal.dumps(compile(source, name, "exec")) for name, source in sources.items()}
    marshal.dump(codes, sys.stdout.buffer)


def _compiled(sources: dict[str, bytes]) -> bytes:
    # Only a Python that is started so leaves columns out; -OO does docstrings and asserts.
    program = f"import marshal, sys\n\n{inspect.getsource(_compile_all)}\n{_compile_all.__name__}()"
    command = [sys.executable, "-I", "-S", "-OO", "-X", "no_debug_ranges", "-c", program]
    answer = subprocess.run(command, input=marshal.dumps(sources), stdout=subprocess.PIPE, check=True).stdout
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, code in marshal.loads(answer).items():
            header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(sources[name])
            archive.writestr(zipfile.ZipInfo(name + "c", _STAMP), header + code, zipfile.ZIP_STORED)
    return out.getvalue()


def _sources() -> Iterator[tuple[str, bytes]]:
    def walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
        for item in sorted(folder.iterdir(), key=lambda i: i.name):
            name = f"{prefix}/{item.name}"
            if name in _ON_THE_DRIVER:
                continue
            if item.is_dir() and item.name != "__pycache__":
                yield from walk(item, name)
            elif item.name.endswith(".py"):
                yield name, item.read_bytes()

    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            yield from walk(importlib.resources.files(package), package)


def left_on_the_driver(name: str, error: ModuleNotFoundError) -> Callable[..., Any]:
    """Return a function in place of `name`, whose module is not in the zip; raise any other error.

    A module of the user's may import it at its top, also where ranks import that module.
    """
    if not (error.name or "").startswith("tritium."):
        raise error

    def refuse(*_: Any, **__: Any) -> Any:
        raise TritiumError(f"{name} is for the driver: executors don't have it. Call it outside of what they run.")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


# --- Kept for the next process


def _directory() -> pathlib.Path | None:
    if os.name != "posix":  # Elsewhere it can't be seen who has written a file.
        return None
    if (chosen := os.environ.get(CACHE)) is not None:
        return pathlib.Path(chosen).absolute() if chosen else None
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(caches, "tritium") if os.path.isabs(caches) else None  # There may be no home.


def _key(sources: dict[str, bytes]) -> str:
    """Return a hash of the sources, which decide the content of the zip: this file, which makes it, is one of them."""
    hashed = hashlib.sha256(f"{sys.version}\0{sys.implementation.cache_tag}".encode())
    for name, source in sources.items():
        hashed.update(f"\0{name}\0{len(source)}\0".encode())
        hashed.update(source)
    return hashed.hexdigest()


def _kept(key: str) -> bytes | None:
    """Return the zip that an earlier process kept, if it is whole, and only this user can have written it."""
    if (directory := _directory()) is None:
        return None
    try:
        with open(directory / f"{key}.xz", "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read()
    except OSError:
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        return None  # Its content runs on executors.
    digest, archive = content[:32], content[32:]
    return archive if hashlib.sha256(archive).digest() == digest else None


def _keep(key: str, archive: bytes) -> None:
    if (directory := _directory()) is None:
        return
    with contextlib.suppress(OSError):  # If the disk is full or read-only, the next process makes it again.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(".part", dir=directory)  # Only this user can read it.
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(archive).digest() + archive)
            os.replace(path, directory / f"{key}.xz")
        except OSError:
            os.unlink(path)
            raise
        for old in sorted(directory.glob("*.xz"), key=os.path.getmtime)[:-_KEPT]:
            old.unlink()
