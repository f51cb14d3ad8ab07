"""The run directory: events, the output of every rank, the report, stored files (driver).

    <run directory>/run.json           the id of the run, and the driver's host and pid; written at its start, so that
                                       ranks recognize the directory
                    events.jsonl       one event a line, in the JSON form of tritium.events
                    events.1.jsonl     those before, of a streaming query, whose events have a limit
                    logs/rank-0.log    everything that rank 0 wrote to stdout and stderr, in its order
                    ranks.json         what each rank does now, its peak memory and use of GPUs; while the run goes on
                    report.json        written when the run has ended: see report.py
                    report.html        the same for people: see page.py
                    trace.json         with trace=, a timeline: see timeline.py
                    …                  files that ranks stored

A number that JSON does not have is written as the string "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from tritium import file_system
from tritium.errors import masked
from tritium.events import Event, RunOpened, plain, stamped
from tritium.file_system import Permissions
from tritium.observe.stored import Piece, StoredFiles

RUN_FILE = "run.json"
RANKS_FILE = "ranks.json"
EVENTS, OLDER_EVENTS = "events.jsonl", "events.1.jsonl"
TIMELINE_FILE, SPANS_FOLDER = "trace.json", "spans"
_SECRET_OPTION = re.compile(r"(-[\w-]*(?:password|passwd|token|secret|key)[\w-]*[= ])('[^']*'|\S+)", re.I)
_TAIL_BYTES = 64 << 10
_LIBRARIES = ("tritium", "pyspark", "pyarrow", "numpy", "torch")


def new_run_dir(run_dir: str | None) -> tuple[str, str]:
    """Return a new run's id, and its directory: `run_dir`, or a new one under `$TRITIUM_RUNS` or `./tritium-runs`."""
    run_id = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    if run_dir is not None:
        return run_id, _absolute(os.fspath(run_dir))
    return run_id, f"{_absolute(runs_folder()).rstrip('/')}/{run_id}"


def runs_folder() -> str:
    """Return the folder in which directories of runs are made."""
    return os.environ.get("TRITIUM_RUNS") or "tritium-runs"


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)  # Ranks work in another directory.


def run_at(run_dir: str) -> str:
    """Return the id of the run whose directory this is. Raises its file system's error where it can't be read."""
    return str(json.loads(file_system.read(f"{run_dir.rstrip('/')}/{RUN_FILE}"))["run"])


def _append_whole(file: IO[bytes], data: bytes) -> None:
    """Append `data` to an unbuffered file, whole or (as on a full disk) not at all. Raises OSError."""
    before, view = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(before)
        raise


def _drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line, as a killed run leaves it, so that the next append starts a line."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        start = end = file.seek(0, os.SEEK_END)
        newline = -1
        while start and newline < 0:  # The line may be longer than one block.
            stop, start = start, max(0, start - _TAIL_BYTES)
            file.seek(start)
            newline = file.read(stop - start).rfind(b"\n")
        if (keep := start + newline + 1) < end:
            file.truncate(keep)


class RunLog:
    """The writer of the run directory during a run. Methods may be called from any thread.

    A directory with a scheme (`s3://…`) is written through fsspec when the log is closed, from a local copy, because
    object stores can't append; files that ranks store are written there at once (stored.py). Events and logs of an
    earlier run in the directory are kept: new ones are appended. When a write fails, the run continues without its log,
    and `problem` says why.

    folder       : the local directory that is written to.
    events_bytes : when events.jsonl has so many, it replaces events.1.jsonl, and a new one begins; None: it never does.
    """

    def __init__(self, run_dir: str, settings: Mapping[str, Any], *, events_bytes: int | None = None) -> None:
        self.run_dir = os.fspath(run_dir)
        self.problem: str | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._events_bytes = events_bytes
        self._ranks: list[dict[str, Any]] = []
        self._remote: tuple[Any, str] | None = None
        if "://" in self.run_dir:
            self._remote = file_system.opened(self.run_dir)
            self.folder = Path(tempfile.mkdtemp(prefix="tritium-run-"))
            try:
                self._fetch()
            except BaseException:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise
        else:
            self.folder = Path(self.run_dir)
        self._permissions = Permissions.within(self.folder)
        self._stored = StoredFiles(self.run_dir, self._remote)
        self._permissions.makedirs(self.folder / "logs")
        shutil.rmtree(self.folder / SPANS_FOLDER, ignore_errors=True)  # A killed driver has left them.
        if settings.get("trace"):
            self._permissions.makedirs(self.folder / SPANS_FOLDER)
        _drop_torn_line(self.folder / EVENTS)
        self.opened = ""
        """The line of the first event."""
        run_id = str(settings.get("run_id", ""))
        self._write_run_file(run_id)
        self.opened = self.event(RunOpened(run=run_id, settings=without_secrets(settings), versions=versions()))

    def _write_run_file(self, run_id: str) -> None:
        facts = {"run": run_id, "started": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        text = json.dumps({**facts, "host": socket.gethostname(), "pid": os.getpid()})
        try:
            if self._remote is not None:
                files, root = self._remote
                if self.run_dir.startswith("file:"):
                    Permissions.within(root)
                files.makedirs(root, exist_ok=True)
                files.pipe_file(f"{root}/{RUN_FILE}", text.encode())
            else:
                part = self.folder / f"{RUN_FILE}.part"
                self._write(part, text)
                part.replace(self.folder / RUN_FILE)
        except Exception as error:  # noqa: BLE001 - fsspec's file systems raise errors of any type
            self.problem = f"{RUN_FILE} could not be written: {error}"

    def event(self, event: Event) -> str:
        """Append one event to events.jsonl, and return its line."""
        line = stamped(event).to_json()
        if self._events_bytes is not None:
            self._limit_events(self._events_bytes)
        self._append(EVENTS, f"{line}\n")
        return line

    def _limit_events(self, limit: int) -> None:
        try:
            if (self.folder / EVENTS).stat().st_size < limit:
                return
            (self.folder / EVENTS).replace(self.folder / OLDER_EVENTS)
        except OSError:  # There is none yet; what else is wrong shows when it is written.
            return
        if self.opened:
            self._append(EVENTS, f"{self.opened}\n")

    def output(self, rank: int, text: str) -> None:
        """Append output of a rank to its log, unchanged."""
        self._append(f"logs/rank-{rank}.log", text)

    def spans(self, rank: int, line: bytes) -> None:
        """Append spans of a rank's steps, until the timeline is made of them."""
        self._append(f"{SPANS_FOLDER}/rank-{rank}.jsonl", line.decode())

    def timeline(self, write: Callable[[Path, IO[str]], object]) -> None:
        """Have `write(folder, file)` write trace.json, and remove the spans that it was made of."""
        try:
            part = self.folder / f"{TIMELINE_FILE}.part"
            with open(part, "w", encoding="utf-8", opener=self._permissions.opener) as file:
                write(self.folder, file)
            part.replace(self.folder / TIMELINE_FILE)
            shutil.rmtree(self.folder / SPANS_FOLDER, ignore_errors=True)
        except OSError as error:
            self.problem = self.problem or f"{TIMELINE_FILE} could not be written: {error}"

    def store(self, piece: Piece) -> bool:
        """Add a piece to a stored file. Returns whether the file is complete and in its place. Raises StoreFailed."""
        with self._lock:
            return self._stored.add(piece)

    def wait_for_uploads(self, on_message: Callable[[str], Any] = lambda _: None) -> list[str]:
        """Wait until all stored files are in their place, also in an object store.

        Returns the names of those stored since the last call. Raises StoreFailed.
        """
        return self._stored.wait_for_uploads(on_message)

    def drop_partial(self) -> None:
        """Remove stored files whose last piece has not come; to be called when their ranks have ended."""
        with self._lock:
            self._stored.discard()

    def report(self, report: Mapping[str, Any], page: str) -> None:
        """Write report.json, and `page` as report.html, each whole or not at all."""
        self._replace("report.json", masked(json.dumps(plain(report), indent=2, ensure_ascii=False)) + "\n")
        self._replace("report.html", masked(page))

    def ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Write ranks.json again, if it is not the same as before."""
        if ranks != self._ranks:
            self._ranks = ranks
            self._replace(RANKS_FILE, json.dumps(ranks))

    def _replace(self, name: str, text: str) -> None:
        with self._lock:
            try:
                part = self.folder / f"{name}.part"
                self._write(part, text)
                part.replace(self.folder / name)
            except OSError as error:
                self.problem = self.problem or f"{name} could not be written: {error}"

    def close(self) -> None:
        """Write pending lines, and remove incomplete stored files. Later events are ignored."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):  # A file that stays does no harm.
                (self.folder / RANKS_FILE).unlink()
            self._stored.close()
            if self._remote is not None:
                self._send()

    def _append(self, name: str, text: str) -> None:
        with self._lock:
            if self._closed or self.problem is not None:
                return
            try:
                with open(self.folder / name, "ab", buffering=0, opener=self._permissions.opener) as file:
                    _append_whole(file, text.encode("utf-8", "backslashreplace"))
            except OSError as error:
                self.problem = f"{name} could not be written any further: {error}"

    def _write(self, path: Path, text: str) -> None:
        with open(path, "w", encoding="utf-8", opener=self._permissions.opener) as file:
            file.write(text)

    def _fetch(self) -> None:
        """Copy the events and logs of earlier runs here. Without `glob`: a name may hold `[`, `?` and `*`."""
        assert self._remote is not None
        files, root = self._remote
        files.invalidate_cache()
        names = [name for name in _names_in(files, root) if name == "events.jsonl"]
        names += [f"logs/{name}" for name in _names_in(files, f"{root}/logs") if name.endswith(".log")]
        for name in names:
            target = self.folder / name
            target.parent.mkdir(exist_ok=True)
            files.get_file(f"{root}/{name}", str(target))

    def _send(self) -> None:
        assert self._remote is not None
        files, root = self._remote
        try:
            for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
                target = f"{root}/{path.relative_to(self.folder).as_posix()}"
                files.makedirs(target.rpartition("/")[0], exist_ok=True)
                files.put_file(str(path), target)
        except Exception as error:  # noqa: BLE001 - fsspec's file systems raise errors of any type
            self.problem = f"the log could not be copied to {self.run_dir}: {error}. It is kept in {self.folder}."
        else:
            shutil.rmtree(self.folder)


def _names_in(files: Any, folder: str) -> list[str]:
    try:
        return [entry.rstrip("/").rpartition("/")[2] for entry in files.ls(folder, detail=False)]
    except FileNotFoundError:
        return []


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the values of environment variables, which are often secrets."""
    return {key: sorted(value) if key == "env" else value for key, value in settings.items()}


def command() -> str | None:
    """Return the command of this process; None at a prompt and in a notebook.

    Without the passwords of URLs, and the values of options that name a secret (`--api-key=***`).
    """
    if not hasattr(sys.modules["__main__"], "__file__"):
        return None
    return masked(_SECRET_OPTION.sub(r"\1***", shlex.join(sys.orig_argv)))


def versions() -> dict[str, str]:
    """Return the versions of Python, of the operating system, and of the libraries installed in this process."""
    return {"system": platform.platform(), **installed(*_LIBRARIES)}


@functools.cache  # To read pip's records of five libraries takes 5 ms.
def installed(*libraries: str) -> Mapping[str, str]:
    """Return the version of Python, and of those libraries that are installed."""
    versions_by_name = {"python": platform.python_version()}
    for name in libraries:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions_by_name[name] = importlib.metadata.version(name)
    return MappingProxyType(versions_by_name)
