"""How an error reads when it leaves `launch`: what failed comes first, what to do next comes last (driver)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tritium.errors import BadRow, DataChanged, IncompleteShard, JobFailed, RankFailed, SetupError, TritiumError, masked

if TYPE_CHECKING:
    from tritium.gang.coordinator.rendezvous import Member
    from tritium.gang.driver.launch import Watch

_PLACES = 4  # so many are told, of a gang whose ranks stand at different ones


def meanwhile(members: Iterable[Member], failed: int) -> tuple[str, ...]:
    """What the other ranks were doing, by their last word: those at the same place in one line, the most first."""
    at: dict[str, list[int]] = {}
    for member in members:
        if member.rank is not None and member.rank != failed and member.standing is not None:
            place = "its function had returned" if member.finished else member.standing.place()
            at.setdefault(place, []).append(member.rank)
    groups = sorted(at.items(), key=lambda group: (-len(group[1]), min(group[1])))
    lines = [f"{numbers(ranks)}: {place}" for place, ranks in groups[:_PLACES]]
    rest = sum(len(ranks) for _, ranks in groups[_PLACES:])
    return (*lines, f"{rest} more elsewhere") if rest else tuple(lines)


def numbers(ranks: Iterable[int]) -> str:
    """`rank 4`, `ranks 0, 2-5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank, rank])
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans]
    return ("rank " if len(spans) == 1 and spans[0][0] == spans[0][1] else "ranks ") + ", ".join(words)


def finish(error: TritiumError, watch: Watch, tried: Sequence[str] = ()) -> None:
    """Add to the message what was tried, where logs and checkpoints are, and how to go on."""
    if isinstance(error, SetupError):
        return
    places = []
    if isinstance(error, (RankFailed, JobFailed, IncompleteShard)):
        places += [f"Logs and events of the whole run: {watch.run_dir}"]
    if watch.newest is not None:
        step, path = watch.newest
        places += [f"Newest checkpoint: step {step}, in {path}"]
        if not isinstance(error, (BadRow, DataChanged)):  # which the same call would meet again
            places += [f'Next: the same call with run_dir="{watch.run_dir}" goes on from there.']
    paragraphs = [str(error).rstrip(), "\n".join(filter(None, tried)), "\n".join(places)]
    error.args = (masked("\n\n".join(filter(None, paragraphs))),)
