"""The supervisors and ranks of a gang, as the coordinator knows them (driver, or the first supervisor)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tritium.accelerators import Accelerators
from tritium.events import Event
from tritium.gang.coordinator.stalls import RankStatus
from tritium.gang.failure import Failure
from tritium.observe.stored import Piece
from tritium.wire import Message

_PLACES_LISTED = 4


@dataclass
class Member:
    """One supervisor and its rank, as it reported."""

    partition: int
    attempt: int
    host: str
    address: str
    port: int
    pid: int
    gpus: tuple[str, ...] = ()
    listed: Mapping[str, str] = field(default_factory=dict)
    """Address → UUID of all GPUs that it can see."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Address → what is known of its own devices: the fields of a Device."""
    executor: str = ""
    spark_executor: str = ""
    """Spark's id of its executor; "" where that is not known."""
    ready: bool = False
    finished: bool = False
    rank: int | None = None
    local_rank: int = 0
    neighbours: Sequence[Member] = field(default=(), repr=False, compare=False)
    """Members that see the same GPUs, itself included, in the order of their local ranks."""
    session: Any = None
    status: RankStatus | None = None
    joined: float = field(default_factory=time.monotonic)
    early: list[Message] = field(default_factory=list)
    early_output: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Member:
        """Make a member from the fields of a `hello` message."""
        return cls(
            partition=int(fields["partition"]),
            attempt=int(fields["attempt"]),
            host=str(fields["host"]),
            address=str(fields["address"]),
            port=int(fields["port"]),
            pid=int(fields["pid"]),
            gpus=tuple(map(str, fields["gpus"])),
            executor=str(fields.get("executor", "")),
            spark_executor=str(fields.get("spark_executor", "")),
        )

    @property
    def number(self) -> int:
        """The rank; assigned when the gang forms."""
        assert self.rank is not None
        return self.rank

    @property
    def best_number(self) -> int:
        """The rank, or the partition before ranks are assigned: for messages."""
        return self.partition if self.rank is None else self.rank

    @property
    def visible(self) -> list[str]:
        """The addresses of all devices of its neighbours: those that its rank can see, in their order there."""
        return list(dict.fromkeys(gpu for member in self.neighbours for gpu in member.gpus))

    def peer(self, accelerators: Accelerators) -> dict[str, Any]:
        """Return the fields of this rank's Peer."""
        device = accelerators.device(self.visible.index(self.gpus[0])) if self.gpus else "cpu"
        return {
            "rank": self.number,
            "host": self.host,
            "address": self.address,
            "local_rank": self.local_rank,
            "device": device,
            "pid": self.pid,
            "devices": [{"address": address, **self.facts.get(address, {})} for address in self.gpus],
        }


def meanwhile(members: Iterable[Member], failed: int) -> tuple[str, ...]:
    """Describe where the other ranks were at their last heartbeat: a line for each place, most ranks first."""
    at: dict[str, list[int]] = {}
    for member in members:
        if member.rank is not None and member.rank != failed and member.status is not None:
            place = "its function had returned" if member.finished else member.status.place()
            at.setdefault(place, []).append(member.rank)
    groups = sorted(at.items(), key=lambda group: (-len(group[1]), min(group[1])))
    lines = [f"{numbers(ranks)}: {place}" for place, ranks in groups[:_PLACES_LISTED]]
    rest = sum(len(ranks) for _, ranks in groups[_PLACES_LISTED:])
    return (*lines, f"{rest} more elsewhere") if rest else tuple(lines)


def numbers(ranks: Iterable[int]) -> str:
    """Format ranks: `rank 4`, `ranks 0, 2-5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank, rank])
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans]
    return ("rank " if len(spans) == 1 and spans[0][0] == spans[0][1] else "ranks ") + ", ".join(words)


class Observer(Protocol):
    """Receives the events of a run. Called from the coordinator's thread."""

    def event(self, event: Event) -> None: ...
    def output(self, rank: int, text: str) -> None: ...
    def store(self, piece: Piece) -> None: ...
    def spans(self, rank: int, line: bytes) -> None: ...


class GangState(Protocol):
    """The coordinator, as its parts use it."""

    size: int
    members: dict[int, Member]
    observer: Observer

    formed: bool
    finished: bool
    failure: Failure | None
    notice: str

    def broadcast(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None: ...
    def after(self, seconds: float, call: Callable[[], None]) -> None: ...
    def end(self, failure: Failure) -> None: ...
    def fail_member(self, member: Member, problem: Exception) -> None: ...
