"""The runs that a page shows, read from their directories as these grow (driver)."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from typing import Any

from tritium.errors import WrongVersion
from tritium.events import RunEnded, read
from tritium.observe.run_directory import EVENTS, OLDER_EVENTS, RANKS_FILE, RUN_FILE
from tritium.observe.runs import is_gone
from tritium.ui.folder import REPORT, RunFolder, runs_in
from tritium.ui.summary import Summary
from tritium.ui.told import Teller

PIECE = 4 << 20
"""The most bytes of events that are read at once, so that the page of a long run fills while it is read."""
LISTED = 200
"""The most runs of one folder in the list."""


class RunView:
    """One run, as far as its directory has been read. Methods may be called from any thread."""

    def __init__(self, place: RunFolder, told: Teller) -> None:
        self.place, self._told = place, told
        self.key = key_of(place.url)
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._summary = Summary(self.place.url, self._told)
        self._at = 0
        self._unread = 0
        self._sections: dict[str, Any] | None = None

    def sections(self) -> tuple[dict[str, Any], bool]:
        """Read what is new, up to PIECE bytes. Returns the parts of the page, and whether there is more to read."""
        with self._lock:
            size = self.place.size(EVENTS)
            if size < self._at:  # Another run is written there; or a query's events were too many.
                self._forget()
            if self._sections is None:
                self._fold(self.place.read(OLDER_EVENTS))
                self._at = 0
            changed = self._sections is None or size > self._at
            if changed:
                self._fold(self.place.read(EVENTS, self._at, min(size, self._at + PIECE)))
                self._sections = self._summary.sections()
            assert self._sections is not None
            files = {"logs": self._logs(), "stacks": self._stacks()}
            head = {**self._sections["head"], **self._state(), "unread": self._unread}
            ranks = self._ranks(self._sections["ranks"]) if head["status"] == "running" else self._sections["ranks"]
            more = self._at < size and changed and self._progressed
            return {**self._sections, **files, "ranks": ranks, "head": head}, more

    def whole(self) -> dict[str, Any]:
        """Read all that is new, and return the parts of the page."""
        more = True
        while more:
            parts, more = self.sections()
        return parts

    def _fold(self, data: bytes) -> None:
        """Take whole lines alone: the writer may be within one."""
        whole = data.rfind(b"\n") + 1
        self._progressed = whole > 0
        self._at += whole
        for line in data[:whole].splitlines():
            try:
                self._summary.event(read(line))
            except (WrongVersion, ValueError, KeyError, TypeError):  # Of a later version, or damaged.
                self._unread += 1

    def _state(self) -> dict[str, Any]:
        """Return the run's status, and what failed where it was no rank."""
        facts, summary = self.place.read_json(RUN_FILE), self._summary
        state = {"path": self.place.url, "status": status(facts, summary.ended, bool(summary.run))}
        if state["status"] == "failed":
            failure = self.place.read_json(REPORT).get("failure")
            if failure and summary.failure is None:
                of_driver = self._told(failure, self.place.url)
                return {**state, "failure": of_driver.what, "next": of_driver.next, "whole": of_driver.whole}
        if state["status"] == "gone":
            what = f"The driver's process {facts.get('pid')} on {facts.get('host')} is gone, and its run with it"
            return {**state, "failure": what, "next": "Start the program again: a run_dir with checkpoints continues."}
        return state

    def _ranks(self, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the ranks with what they do now."""
        try:
            now = {entry["rank"]: entry for entry in json.loads(self.place.read(RANKS_FILE) or b"[]")}
        except ValueError:
            return ranks
        return [{**rank, **now.get(rank["rank"], {})} if rank["state"] == "running" else rank for rank in ranks]

    def _logs(self) -> dict[str, int]:
        names = [name for name in self.place.names("logs") if name.startswith("rank-") and name.endswith(".log")]
        ranks = sorted(int(name[5:-4]) for name in names if name[5:-4].isdecimal())
        return {str(rank): self.place.size(log_of(rank)) for rank in ranks}

    def _stacks(self) -> list[str]:
        return self.place.names("stacks")

    def row(self) -> dict[str, Any]:
        """Return the run's line in the list, from its two small files."""
        facts, report = self.place.read_json(RUN_FILE), self.place.read_json(REPORT)
        whole = report if report.get("run") == facts.get("run") else {}
        ended = RunEnded(ok=bool(whole["ok"]), seconds=whole.get("seconds") or 0.0) if whole else None
        failed = None if whole.get("ok") else whole.get("failure")
        return {
            "key": self.key,
            "run": facts.get("run") or self.place.name,
            "path": self.place.url,
            "started": facts.get("started"),
            "status": status(facts, ended, bool(facts)),
            "seconds": ended and ended.seconds,
            "ranks": len(whole.get("ranks", ())) or None,
            "failure": failed and self._told(failed, self.place.url).what,
        }


def status(facts: dict[str, Any], ended: RunEnded | None, known: bool) -> str:
    """Return "succeeded", "failed", "running", "gone" (the driver was killed) or "unknown" (nothing is written yet)."""
    if ended is not None:
        return "succeeded" if ended.ok else "failed"
    if not known:
        return "unknown"
    return "gone" if is_gone(facts) else "running"


def log_of(rank: int) -> str:
    """Return the name of a rank's log in the run directory."""
    return f"logs/rank-{rank}.log"


def key_of(url: str) -> str:
    """Return the name of a run in the page's addresses, so that these hold no path of the machine."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


class Runs:
    """The runs at some places: run directories, or folders of them. Methods may be called from any thread."""

    def __init__(self, urls: Iterable[str], told: Teller) -> None:
        self._urls, self._told = list(urls), told
        self._lock = threading.Lock()
        self._views: dict[str, RunView] = {}

    def add(self, url: str, here: str) -> str:
        """Add the directory of a run that begins, and return its key.

        here : the local directory in which it is written, until the run ends.
        """
        with self._lock:
            view = RunView(RunFolder(url, here), self._told)
            self._views[view.key] = view
            return view.key

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines of the list, the newest run first."""
        with self._lock:
            places = {place.url: place for url in self._urls for place in runs_in(url)[:LISTED]}
            for place in places.values():
                self._views.setdefault(key_of(place.url), RunView(place, self._told))
            views = list(self._views.values())
        return sorted((view.row() for view in views), key=lambda row: row["started"] or "", reverse=True)

    def get(self, key: str) -> RunView | None:
        """Return the run of this key; None where there is no such run at these places."""
        if key not in self._views:
            self.rows()
        return self._views.get(key)
