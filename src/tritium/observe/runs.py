"""The run directories that Tritium itself has named, in one folder (driver)."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from tritium.errors import BadSetting
from tritium.file_system import size_of
from tritium.observe.run_directory import RUN_FILE, runs_folder

MANY = 20
_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
"""Matches a run's id, as `new_run_dir` makes it."""
_said: set[str] = set()


@dataclass(frozen=True)
class KeptRun:
    """A run directory.

    started : the time in its own record.
    ended   : whether its run is known to have ended: it has a report, or its process on this machine is gone.
    """

    path: Path
    started: datetime
    ended: bool

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return size_of(self.path)

    def remove(self) -> None:
        """Remove the directory with all that is in it. Raises OSError."""
        shutil.rmtree(self.path)


def kept_in(folder: Path) -> list[KeptRun]:
    """Return the run directories in a folder, the newest first; all else in it is left out."""
    runs = [run for entry in _named(folder) if (run := _read(Path(entry))) is not None]
    return sorted(runs, key=lambda run: (run.started, run.path.name), reverse=True)


def to_remove(runs: list[KeptRun], keep: int, older: float) -> list[KeptRun]:
    """Return those of `runs` (newest first) that are neither among the first `keep` nor younger than `older` days."""
    before = datetime.now(timezone.utc) - timedelta(days=older)
    return [run for run in runs[keep:] if run.ended and run.started <= before]


def folder_of(place: str | None) -> Path:
    """Return the local folder of runs: `place`, or that of new runs. Raises BadSetting for any other."""
    folder = place or runs_folder()
    if "://" in folder:
        raise BadSetting(
            f"{folder} is no local directory: remove its runs with the tools of its store.", setting="runs"
        )
    if not os.path.isdir(folder):
        raise BadSetting(f"There is no directory {folder!r}.", setting="runs")
    return Path(folder)


def growth(run_dir: str | None) -> list[str]:
    """Return a note, once a process, where more than MANY runs lie in `./tritium-runs`, which nobody has chosen."""
    folder = runs_folder()
    if run_dir is not None or os.environ.get("TRITIUM_RUNS") or folder in _said:
        return []
    count = len(_named(Path(folder)))
    if count <= MANY:
        return []
    _said.add(folder)
    return [f"{count} runs are kept in {folder}: `tritium clean --keep {MANY}` removes the oldest, and asks first"]


def _named(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [e.path for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except OSError:  # There is none yet.
        return []


def _read(path: Path) -> KeptRun | None:
    facts = _json(path / RUN_FILE)
    try:
        started = datetime.fromisoformat(str(facts["started"]))
    except (KeyError, ValueError):
        return None
    if facts.get("run") != path.name or started.tzinfo is None:  # Someone else has named it.
        return None
    ended = _json(path / "report.json").get("run") == path.name or is_gone(facts)
    return KeptRun(path, started, ended)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_gone(facts: dict[str, Any]) -> bool:
    """Tell whether the process that made the run was one of this machine, and is there no more."""
    pid = facts.get("pid")
    if facts.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
