"""What happened in a run, in words: one entry for each event that a reader wants to see (driver)."""

from __future__ import annotations

from typing import Literal, NamedTuple

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


class EventLine(NamedTuple):
    """One line, with details that fold open."""

    text: str
    details: str = ""
    level: Literal["", "good", "warn", "bad"] = ""

    @property
    def whole(self) -> str:
        """The text with its details."""
        return "\n".join(filter(None, [self.text, self.details.rstrip()]))


def entry_of(event: Event) -> EventLine | None:
    """Return the entry of an event; None for a kind of which there are too many, or that says nothing by itself."""
    match event:
        case RunOpened():
            return EventLine("the run began")
        case GangStarted(ranks=ranks):
            return EventLine(f"starting {ranks} ranks")
        case GangFormed(peers=peers):
            places = ", ".join(f"rank {peer['rank']} on {peer['host']}" for peer in peers)
            return EventLine(formed(event), places, "good") if peers else None
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
            where = f"rank {event.rank} on {event.host} (pid {event.pid})"
            return EventLine(f"{where}: {event.signal or event.type or event.how} {event.text}", event.traceback, "bad")
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
