"""A page about runs while they go on, from their events: what report.html shows of each (driver)."""

from __future__ import annotations

import threading

from tritium.events import Event, RunOpened
from tritium.observe.page import RunPage
from tritium.observe.report import Report

__all__ = ["RunsPage"]


class RunsPage:
    """The page of all runs whose events come, as HTML without a frame; its charts are SVG, and it has no scripts.

        page = RunsPage()
        with tr.listen(page.add):
            ...

    Events may come from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[Report, RunPage]] = {}
        self._fresh = False

    def add(self, event: Event) -> None:
        """Take an event: the callback of `tr.listen`."""
        with self._lock:
            if isinstance(event, RunOpened):
                run_dir = str(event.settings.get("run_dir") or "")
                self._runs[event.run] = Report(event.run, run_dir, event.settings), RunPage()
            if (run := self._runs.get(event.run)) is not None:
                report, page = run
                report.event(event)
                page.add(event)
                self._fresh = True

    def taken(self) -> str | None:
        """Return the page where an event has come since the last call; else None."""
        with self._lock:
            if not self._fresh:
                return None
            self._fresh = False
            return "".join(page.body(report.build()) for report, page in self._runs.values())
