"""Compare how far the ranks of a stalled gang have come in their collectives (driver, or the first supervisor)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class CollectiveCalls:
    """The collectives that one rank has called in one group of ranks, numbered from 1.

    group  : the name of the group, the same on all its ranks.
    ranks  : its members; empty where they are not known.
    called : the number of the last collective that the rank has called.
    waits  : the number of the first that has not ended there; None: all have.
    name   : what that one is, or else the last one: `all_reduce of Float [4]`.
    """

    group: str
    ranks: list[int]
    called: int
    waits: int | None
    name: str


@dataclass
class Awaited:
    """A collective in which ranks of a group wait, and where its other members are.

    group   : its members; empty for all ranks of the gang.
    calls   : the ranks that wait in it, by what they have called.
    behind  : the ranks that have not called it, by the number of their last call.
    through : the ranks where it has ended.
    silent  : the ranks that have not answered.
    """

    number: int
    group: list[int]
    calls: dict[str, list[int]] = field(default_factory=dict)
    behind: dict[int, list[int]] = field(default_factory=dict)
    through: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)

    def line(self) -> str:
        """Write `Collective number 6: ranks 0, 1 wait in all_reduce; rank 2 has not called it (last call: …).`"""
        texts = [f"{_ranks(ranks, 'waits', 'wait')} in {call}" for call, ranks in self.calls.items()]
        for last, ranks in self.behind.items():
            only = f"last call: number {last}" if last else "no call known"
            texts.append(f"{_ranks(ranks, 'has', 'have')} not called it ({only})")
        if self.through:
            texts.append(f"it has ended on {_ranks(self.through)}")
        if self.silent:
            texts.append(f"{_ranks(self.silent, 'does', 'do')} not answer")
        group = f" of the group of {_ranks(self.group)}" if self.group else ""
        return f"Collective number {self.number}{group}: {'; '.join(texts)}."


def awaited(by_rank: Mapping[int, Sequence[CollectiveCalls] | None]) -> Iterator[Awaited]:
    """Yield the first collective in which a rank waits, for each group that has one.

    by_rank : the calls of every rank of the gang, in order; None for one that has not answered.
    """
    groups: dict[str, dict[int, CollectiveCalls]] = {}
    for rank, groups_of_rank in by_rank.items():
        for calls in groups_of_rank or ():
            groups.setdefault(calls.group, {})[rank] = calls
    for called in groups.values():
        first = min((c for c in called.values() if c.waits is not None), key=lambda c: c.waits or 0, default=None)
        if first is not None and first.waits is not None:
            members = first.ranks or list(called)
            result = Awaited(first.waits, members if len(members) < len(by_rank) else [])
            for rank in members:
                _sort(result, rank, called.get(rank), answered=by_rank.get(rank) is not None)
            yield result


def _sort(result: Awaited, rank: int, calls: CollectiveCalls | None, *, answered: bool) -> None:
    if calls is not None and calls.waits == result.number:
        result.calls.setdefault(calls.name, []).append(rank)
    elif calls is not None and calls.called >= result.number:
        result.through.append(rank)
    elif answered:
        result.behind.setdefault(0 if calls is None else calls.called, []).append(rank)
    else:
        result.silent.append(rank)


def _ranks(ranks: Sequence[int], one: str = "", several: str = "") -> str:
    names = ", ".join(map(str, ranks))
    return (f"rank {names} {one}" if len(ranks) == 1 else f"ranks {names} {several}").rstrip()
