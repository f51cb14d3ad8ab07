"""All-gathers of bytes among the ranks: `gather`, `barrier`, checkpoints (driver, or the first supervisor)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium.gang.coordinator.members import GangState, Member
from tritium.wire import MAX_BLOB, Message


@dataclass
class AllGather:
    """One call of an all-gather: its values so far, until every rank has made the call."""

    number: int
    size: int
    tag: str = "main"
    """The calls of each tag are counted on their own."""
    values: dict[int, bytes] = field(default_factory=dict)
    total_bytes: int = 0
    largest: tuple[int, int] = (0, 0)
    """The bytes of the largest value, and its rank."""
    answered: set[int] = field(default_factory=set)
    """The ranks that have their answer."""
    operations: dict[int, str] = field(default_factory=dict)
    problem: str | None = None

    def add(self, rank: int, message: Message) -> None:
        """Add a rank's value. Sets `problem` when ranks make different calls, or send over MAX_BLOB."""
        self.values[rank] = message.blob
        self.total_bytes += len(message.blob)
        self.largest = max(self.largest, (len(message.blob), rank))
        operation = self.operations[rank] = str(message["operation"])
        if operation != next(iter(self.operations.values())):
            calls = ", ".join(f"rank {r} calls {op}()" for r, op in sorted(self.operations.items()))
            self.problem = f"Ranks disagree about call {self.number + 1}: {calls}. All must make the same calls."
        elif self.problem is None and self.total_bytes > MAX_BLOB:
            size, largest = self.largest
            self.problem = (
                f"the values of {len(self.values)} of {self.size} ranks are {self.total_bytes:,} bytes together, the "
                f"largest that of rank {largest} with {size:,}; one call takes {MAX_BLOB:,} of all ranks. Gather less "
                "at once, exchange arrays by a collective of the framework, or write files with world.store()."
            )
        if self.problem is not None:
            self.values = dict.fromkeys(self.values, b"")  # Frees the memory, as nobody gets them.

    def left_by(self, gone: Sequence[int]) -> str | None:
        """Return the problem when a rank in `gone` has returned without this call; None when there is none."""
        absent = sorted(set(gone) - set(self.values))
        if not absent or not self.values:
            return None
        waiting = ", ".join(map(str, sorted(self.values)))
        operation = next(iter(self.operations.values()))
        return f"rank {absent[0]} has returned and will never reach {operation}(), where rank {waiting} waits."

    @property
    def full(self) -> bool:
        """Whether every rank has made the call."""
        return len(self.values) == self.size

    def outcome(self) -> tuple[bytes, dict[str, Any]]:
        """Return blob and fields of the answer: all values in rank order with their lengths, or the problem."""
        if self.problem is not None:
            return b"", {"tag": self.tag, "number": self.number, "problem": self.problem}
        blobs = [self.values[rank] for rank in range(self.size)]
        return b"".join(blobs), {"tag": self.tag, "number": self.number, "lengths": [len(b) for b in blobs]}


class AllGathers:
    """The all-gathers of a gang that have not been answered yet, by tag and number."""

    def __init__(self, gang: GangState) -> None:
        self.open: dict[tuple[str, int], AllGather] = {}
        self._gang = gang

    def on_gather(self, member: Member, message: Message) -> None:
        """Handle a rank's call, and answer when all have come or the call has failed."""
        tag, number = str(message.fields.get("tag", "main")), int(message["number"])
        gather = self.open.setdefault((tag, number), AllGather(number, self._gang.size, tag))
        gather.add(member.number, message)
        if gather.problem is None:
            gather.problem = gather.left_by([m.number for m in self._gang.members.values() if m.finished])
        if gather.problem is not None or gather.full:
            self._answer(gather)
        if gather.full:
            del self.open[tag, number]

    def leave(self, member: Member) -> None:
        """Fail the open calls that a rank whose function has returned will never make."""
        for gather in list(self.open.values()):
            gather.problem = gather.problem or gather.left_by([member.number])
            if gather.problem is not None:
                self._answer(gather)

    def _answer(self, gather: AllGather) -> None:
        """Send the outcome to every rank that has made the call and has no answer yet."""
        blob, fields = gather.outcome()
        for member in self._gang.members.values():
            if member.number in gather.values and member.number not in gather.answered:
                gather.answered.add(member.number)
                member.session.send("gathered", blob, **fields)
