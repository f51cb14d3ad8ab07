"""File systems by fsspec, and the permissions of files in a local run directory (any process)."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


def opened(url: str, *, shared: bool = False) -> tuple[Any, str]:
    """Return an fsspec file system for a path or URL, and the path in it. To write, it must not be `shared`.

    fsspec has one instance of a store for all code of a thread. While that instance is in a transaction, a file that is
    written through it, by any thread, appears only when the transaction ends. Lightning's ModelCheckpoint makes one for
    each save, which a checkpoint that is written in the background then waits for. So a writer has an instance of its
    own.

    shared : the instance that others use, too. Less work, as a new one connects to its store again.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        # Namespace packages such as `backports` find their parts by pkgutil, which would ask for it and raise.
        sys.path_importer_cache.setdefault("", None)
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


def size_of(folder: str | os.PathLike[str]) -> int:
    """Return the bytes of all files in a local directory, and in those below it. Others may remove some meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


@dataclass(frozen=True)
class Permissions:
    """The modes of directories and files that are made in a run directory, before the process's umask."""

    directory: int
    file: int

    @classmethod
    def within(cls, run_dir: str | os.PathLike[str]) -> Permissions:
        """Return those in a local run directory. A missing one is made, for its owner alone, as is all in it.

        A directory that others may enter keeps the usual modes for what is made in it: where executors run as another
        user, the user has made it for both.
        """
        os.makedirs(os.path.dirname(os.path.abspath(run_dir)), exist_ok=True)
        try:
            os.mkdir(run_dir, 0o700)
        except FileExistsError:
            if os.stat(run_dir).st_mode & 0o077:
                return cls(0o777, 0o666)
        return cls(0o700, 0o600)

    def makedirs(self, path: str | os.PathLike[str]) -> None:
        """Make a directory, and those above it, in the run directory."""
        above = os.path.dirname(path)
        if not os.path.isdir(above):
            self.makedirs(above)
        try:
            os.mkdir(path, self.directory)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def opener(self, path: str, flags: int) -> int:
        """Open a file of the run directory, as the `opener` of `open`."""
        return os.open(path, flags, self.file)
