"""Directories of a host that one process makes and others use, each in a place with a limit (any process)."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tritium.errors import BadSetting


class CacheEntry:
    """A directory of the cache, which is not removed until `close`, or the end of this process.

    path : of the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = os.open(path, os.O_RDONLY)
        fcntl.flock(self._folder, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let it be removed, when more recent ones need its place."""
        os.close(self._folder)


def entry(folder: Path, make: Callable[[Path], Path]) -> CacheEntry:
    """Return the directory `folder`; the first process of the host makes it, and others wait.

    make : makes it under another name, which is handed in and may have what was left by one that was killed. Returns
           the directory to be renamed.
    """
    with _changing(folder, fcntl.LOCK_EX):
        if not folder.exists():
            building = folder.with_suffix(".part")
            make(building).rename(folder)
            shutil.rmtree(building, ignore_errors=True)  # Where a part of it was renamed.
        os.utime(folder)
        return CacheEntry(folder)


def root(variable: str, name: str, why: str) -> Path:
    """Return the directory that an environment variable names, or one with `name` for temporary files; make it.

    why : the sentence on why only this user may write there. Raises BadSetting where others may, too.
    """
    path = Path(os.environ.get(variable) or Path(tempfile.gettempdir(), f"{name}-{os.getuid()}"))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BadSetting(
            f"{path} on {socket.gethostname()} could be written by another user, and {why}. Remove it, or name another "
            f"directory by {variable} (spark.executorEnv.{variable}).",
            path=str(path),
        )
    return path


def remove_old(root: Path, most: int, size: Callable[[Path], int] = lambda folder: 1) -> None:
    """Remove the directories that were not used for longest, until the sizes of the others are at most `most`.

    Those in use stay, and those that are being made.
    """
    for folder in sorted((path for path in root.iterdir() if path.is_dir()), key=_last_use, reverse=True):
        most -= size(folder)
        if most >= 0:
            continue
        with suppress(BlockingIOError, FileNotFoundError), _changing(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


@contextmanager
def _changing(folder: Path, operation: int) -> Iterator[None]:
    """Hold the lock under which a directory is made, removed, or taken into use."""
    with open(folder.with_suffix(".lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, operation)
        yield


def _last_use(folder: Path) -> float:
    with suppress(FileNotFoundError):  # Another process may have removed it.
        return folder.stat().st_mtime
    return 0.0
