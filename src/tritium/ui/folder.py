"""Read a run directory, local or remote, in pieces (driver)."""

from __future__ import annotations

import json
import os
import posixpath
from pathlib import Path
from typing import Any

from tritium import file_system
from tritium.observe.run_directory import EVENTS, RUN_FILE

REPORT = "report.json"


class RunFolder:
    """A directory by path or fsspec URL. Its methods may be called from any thread, and see what is there now.

    here : a local directory whose files are read instead as long as it exists: a run writes there what it sends to a
           store at its end.
    """

    def __init__(self, url: str, here: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._here = RunFolder(here) if here not in (None, url) else None
        self._remote = "://" in url and not url.startswith("file:")
        self._files, self._root = file_system.opened(self.url)

    @property
    def remote(self) -> bool:
        """Whether its files are read from a store."""
        return self._remote and not self._is_here()

    def _is_here(self) -> bool:
        return self._here is not None and os.path.isdir(self._here.url)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return posixpath.basename(self.url)

    def within(self, name: str) -> RunFolder:
        """Return a directory in this one."""
        return RunFolder(f"{self.url}/{name}")

    def size(self, name: str) -> int:
        """Return the bytes of a file, 0 where there is none."""
        if self._here is not None and self._is_here():
            return self._here.size(name)
        self._look_again()
        try:
            return int(self._files.size(f"{self._root}/{name}") or 0)
        except FileNotFoundError:
            return 0

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of a file from `start` to `end`, as far as there are any; b"" where there is no file."""
        if self._here is not None and self._is_here():
            return self._here.read(name, start, end)
        self._look_again()
        if start is not None and start == end:
            return b""
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}", start, end))
        except FileNotFoundError:
            return b""

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file; {} where there is none, or it is no object."""
        try:
            content = json.loads(self.read(name))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names of what is in a folder; none where there is no such folder."""
        if self._here is not None and self._is_here():
            return self._here.names(folder)
        self._look_again()
        try:
            paths = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(posixpath.basename(str(path).rstrip("/")) for path in paths)

    def is_run(self) -> bool:
        """Whether this is the directory of a run."""
        return bool(self.size(RUN_FILE) or self.size(EVENTS))

    def _look_again(self) -> None:
        if self._remote:
            self._files.invalidate_cache()


def runs_in(url: str) -> list[RunFolder]:
    """Return the run directory at `url`, or those in that folder, the newest name first."""
    place = RunFolder(url if "://" in url else str(Path(url).absolute()))
    if place.is_run():
        return [place]
    return [run for name in reversed(place.names()) if (run := place.within(name)).is_run()]
