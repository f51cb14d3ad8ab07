"""What ranks exchange and agree on: `gather`, `barrier`, the shapes of columns (driver, or the first supervisor)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium.errors import BadRow
from tritium.gang.coordinator.members import Gang, Member
from tritium.wire import MAX_BLOB, Message


@dataclass
class Rendezvous:
    """One `gather` or `barrier`: the values so far, until every rank has come."""

    number: int
    size: int
    lane: str = "main"  # meetings are counted by lane
    values: dict[int, bytes] = field(default_factory=dict)
    total: int = 0  # bytes of all values
    largest: tuple[int, int] = (0, 0)  # bytes of the largest, and whose it is
    told: set[int] = field(default_factory=set)  # who has heard what came of it
    operations: dict[int, str] = field(default_factory=dict)
    problem: str | None = None

    def add(self, rank: int, message: Message) -> None:
        """A rank has come. All must have come for the same."""
        self.values[rank] = message.blob
        self.total += len(message.blob)
        self.largest = max(self.largest, (len(message.blob), rank))
        operation = self.operations[rank] = str(message["operation"])
        if operation != next(iter(self.operations.values())):
            calls = ", ".join(f"rank {r} calls {op}()" for r, op in sorted(self.operations.items()))
            self.problem = f"Ranks disagree about meeting {self.number + 1}: {calls}. All must make the same calls."
        elif self.problem is None and self.total > MAX_BLOB:
            size, largest = self.largest
            self.problem = (
                f"the values of {len(self.values)} of {self.size} ranks are {self.total:,} bytes together, the largest "
                f"that of rank {largest} with {size:,}; one call takes {MAX_BLOB:,} of all ranks. Gather less at once, "
                "exchange arrays by a collective of the framework, or write files with world.store()."
            )
        if self.problem is not None:
            self.values = dict.fromkeys(self.values, b"")  # no one will have them

    def left_by(self, gone: Sequence[int]) -> str | None:
        """What to say when ranks that have returned will never come."""
        absent = sorted(set(gone) - set(self.values))
        if not absent or not self.values:
            return None
        waiting = ", ".join(map(str, sorted(self.values)))
        operation = next(iter(self.operations.values()))
        return f"rank {absent[0]} has returned and will never reach {operation}(), where rank {waiting} waits."

    @property
    def full(self) -> bool:
        """Whether every rank has come."""
        return len(self.values) == self.size

    def outcome(self) -> tuple[bytes, dict[str, Any]]:
        """What every rank that came is told: all values in rank order, or the problem."""
        if self.problem is not None:
            return b"", {"lane": self.lane, "number": self.number, "problem": self.problem}
        blobs = [self.values[rank] for rank in range(self.size)]
        return b"".join(blobs), {"lane": self.lane, "number": self.number, "lengths": [len(b) for b in blobs]}


Columns = Mapping[str, Sequence[Mapping[str, Any]]]


def agree(columns: Mapping[int, Columns]) -> tuple[dict[str, dict[str, list[int]]], BadRow | None]:
    """The shape of every column, which an empty shard can't know itself; or the error that ranks have different ones.

    `columns` is, per rank and name, the spool's descriptions; a shape of None is not known there.
    """
    shapes: dict[str, dict[str, list[int]]] = {}
    seen: dict[tuple[str, str], int] = {}
    for rank, names in sorted(columns.items()):
        for name, descriptions in names.items():
            known = shapes.setdefault(name, {})
            for column in descriptions:
                label, shape = column["name"], column.get("shape")
                if shape is None:
                    continue
                if known.setdefault(label, list(shape)) != list(shape):
                    other = seen[name, label]
                    return shapes, BadRow(
                        f"{name}: rows of column {label!r} have the shape {known[label]} on rank {other} and "
                        f"{list(shape)} on rank {rank}. Make them one length, or pad them: "
                        f"tr.Data(df, pad={{{label!r}: length}}).",
                        column=label,
                    )
                seen.setdefault((name, label), rank)
    return shapes, None


class Meetings:
    """Every `gather` and `barrier` of a gang that has not been answered yet, by lane and number."""

    def __init__(self, gang: Gang) -> None:
        self.open: dict[tuple[str, int], Rendezvous] = {}
        self._gang = gang

    def on_gather(self, member: Member, message: Message) -> None:
        """A rank has come."""
        lane, number = str(message.fields.get("lane", "main")), int(message["number"])
        meeting = self.open.setdefault((lane, number), Rendezvous(number, self._gang.size, lane))
        meeting.add(member.number, message)
        if meeting.problem is None:
            meeting.problem = meeting.left_by([m.number for m in self._gang.members.values() if m.finished])
        if meeting.problem is not None or meeting.full:
            self._answer(meeting)
        if meeting.full:
            del self.open[lane, number]

    def leave(self, member: Member) -> None:
        """A rank's function has returned: it comes to no further meeting."""
        for meeting in list(self.open.values()):
            meeting.problem = meeting.problem or meeting.left_by([member.number])
            if meeting.problem is not None:
                self._answer(meeting)

    def _answer(self, meeting: Rendezvous) -> None:
        """Tell those who have come, and have not heard it yet, what came of it."""
        blob, fields = meeting.outcome()
        for member in self._gang.members.values():
            if member.number in meeting.values and member.number not in meeting.told:
                meeting.told.add(member.number)
                member.session.send("gathered", blob, **fields)
