"""The line of events: one entry for each event that a reader of a run wants to see (driver)."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, NamedTuple

from tritium.events import (
    CheckpointLoaded,
    CheckpointSaved,
    ConnectionRefused,
    Disconnected,
    Event,
    GangFailed,
    GangFormed,
    GangRegrouped,
    GangRetried,
    GangStalled,
    GangStarted,
    ModelVersion,
    NonFatalError,
    Note,
    Reconnected,
    RowsReceived,
    RunEnded,
    RunOpened,
    Waiting,
)
from tritium.ui.told import Teller

KEPT = 300
"""The most entries that are kept: of checkpoints, and of all others."""


class EventLine(NamedTuple):
    """One line, with details that fold open."""

    text: str
    details: str = ""
    level: Literal["", "good", "warn", "bad"] = ""


class Entries:
    """The newest entries of a run. Checkpoints, of which a run may have thousands, push no other out."""

    def __init__(self, run_dir: str, told: Teller) -> None:
        self._run_dir, self._told = run_dir, told
        self._checkpoints: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._others: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._number = 0

    def event(self, event: Event) -> None:
        """Add the event's entry, if it has one."""
        entry = entry_of(event, self._run_dir, self._told)
        if entry is not None:
            self._number += 1
            entries = self._checkpoints if isinstance(event, CheckpointSaved) else self._others
            entries.append({"number": self._number, "time": event.time, "kind": event.kind, **entry._asdict()})

    def to_json(self) -> list[dict[str, Any]]:
        """Return the entries in the order of their events."""
        return sorted([*self._checkpoints, *self._others], key=lambda entry: entry["number"])


def entry_of(event: Event, run_dir: str, told: Teller) -> EventLine | None:
    """Return the entry of an event; None for a kind of which there are too many, or that says nothing by itself."""
    match event:
        case RunOpened():
            return EventLine("the run began")
        case GangStarted(ranks=ranks):
            return EventLine(f"starting {ranks} ranks")
        case GangFormed(peers=peers):
            return EventLine(formed(event), level="good") if peers else None
        case RowsReceived(rows=rows):
            total = ", ".join(f"{sum(map(int, counts)):,} of {name!r}" for name, counts in rows.items())
            return EventLine(f"all rows are there: {total}", level="good")
        case CheckpointSaved(step=step, bytes=size, seconds=seconds, path=path):
            return EventLine(f"checkpoint of step {step}: {size:,} bytes in {seconds:.2f} s", path, "good")
        case CheckpointLoaded(step=step, path=path):
            return EventLine(f"continues from the checkpoint of step {step}", path, "good")
        case Waiting(text=text) | Note(text=text):
            return _folded(text)
        case GangStalled(text=text):
            return _folded(text)._replace(level="bad")
        case GangFailed():
            failure = told(event.fields(), run_dir)
            return EventLine(failure.what, failure.whole, "bad")
        case GangRetried(number=number, of=most, start=start, reason=reason):
            place = "the beginning" if start is None else f"the checkpoint of step {start}"
            return EventLine(f"retry {number} of {most}, from {place}", reason, "warn")
        case GangRegrouped(text=reason):
            return EventLine(f"the gang has saved its state, and ends: {reason}", level="warn")
        case NonFatalError():
            return EventLine(event.headline(), event.traceback, "warn")
        case ModelVersion(version=version, path=path, refused=None):
            return EventLine(f"version {version} of {path} is taken", level="good")
        case ModelVersion(version=version, path=path, refused=str(reason)):
            first, _, rest = reason.partition("\n")
            return EventLine(f"version {version} of {path} is refused: {first}", rest, "warn")
        case ConnectionRefused(reason=reason):
            return EventLine(f"a connection was refused: {reason}", level="warn")
        case Disconnected(rank=rank, host=host):
            return EventLine(f"the connection to rank {rank} on {host} broke", level="warn")
        case Reconnected(rank=rank, host=host):
            return EventLine(f"rank {rank} on {host} is connected again", level="good")
        case RunEnded(ok=ok, seconds=seconds):
            return EventLine(f"{ended(event)} after {seconds:,.1f} s", level="good" if ok else "bad")
    return None


def formed(event: GangFormed) -> str:
    """Return the world size and the number of hosts in words."""
    hosts = len({peer["host"] for peer in event.peers})
    return f"{len(event.peers)} ranks on {hosts} host{'s' * (hosts > 1)}"


def ended(event: RunEnded) -> str:
    """Return how the run ended in words."""
    return "ended well" if event.ok else "failed"


def _folded(text: str) -> EventLine:
    first, _, rest = text.partition("\n")
    return EventLine(first, rest.strip())
