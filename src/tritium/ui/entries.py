"""The line of events: the newest entries of a run (driver)."""

from __future__ import annotations

from collections import deque
from typing import Any

from tritium.events import CheckpointSaved, Event, GangFailed
from tritium.observe.entries import EventLine, entry_of
from tritium.ui.told import Teller

KEPT = 300
"""The most entries that are kept: of checkpoints, and of all others."""


class Entries:
    """The newest entries of a run. Checkpoints, of which a run may have thousands, push no other out."""

    def __init__(self, run_dir: str, told: Teller) -> None:
        self._run_dir, self._told = run_dir, told
        self._checkpoints: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._others: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._number = 0

    def event(self, event: Event) -> None:
        """Add the event's entry, if it has one."""
        entry = self._failure(event) if isinstance(event, GangFailed) else entry_of(event)
        if entry is not None:
            self._number += 1
            entries = self._checkpoints if isinstance(event, CheckpointSaved) else self._others
            entries.append({"number": self._number, "time": event.time, "kind": event.kind, **entry._asdict()})

    def _failure(self, event: GangFailed) -> EventLine:
        failure = self._told(event.fields(), self._run_dir)
        return EventLine(failure.what, failure.whole, "bad")

    def to_json(self) -> list[dict[str, Any]]:
        """Return the entries in the order of their events."""
        return sorted([*self._checkpoints, *self._others], key=lambda entry: entry["number"])
