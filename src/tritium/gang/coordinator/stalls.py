"""Decide which ranks are hung and which is at fault, and write the report (driver, or the first supervisor)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium.gang.coordinator.collective_calls import CollectiveCalls, awaited
from tritium.gang.stall_limit import StallLimit
from tritium.gang.supervisor.process_stats import STATES


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The last heartbeat of one rank's supervisor, received at the time `heard`. All seconds are as of then."""

    rank: int = -1
    host: str = ""
    finished: bool = False
    """Whether its function has returned."""
    heard: float
    step: int | None = None
    epoch: int | None = None
    doing: str = "other"
    phase: str = "starting"
    seconds: float = 0.0
    quiet: float = 0.0
    """Seconds since its last progress."""
    idle: float = 0.0
    """Seconds since its process last used CPU."""
    taken: int = 0
    """Number of batches it has taken."""
    step_limit: float | None = None
    """Seconds without a step after which a busy rank is considered hung, where that is longer than the gang's limit;
    None when it does not show its steps."""
    state: str = ""
    """State letter of its process, as in `/proc/<pid>/stat`."""
    memory: int | None = None
    """Peak memory of its process in bytes; None where that is not known."""
    gpu: float | None = None
    """Share of the time in which its GPUs computed, 0 to 1; None where that is not known."""
    gpu_memory: int | None = None
    """Memory of its GPUs that is used, also by other processes, in bytes; None where that is not known."""
    rows: dict[str, int] = field(default_factory=dict)
    receiving: bool = False
    rows_quiet: float = 0.0
    """Seconds since the last row arrived, or Spark used CPU for them."""

    @classmethod
    def read(cls, fields: Mapping[str, Any], heard: float) -> RankStatus:
        """Make a status from the fields of a heartbeat message."""
        words: dict[str, Any] = {name: str(fields[name]) for name in ("doing", "phase", "state")}
        words |= {name: float(fields[name]) for name in ("seconds", "quiet", "idle", "rows_quiet")}
        step, epoch, limit = fields.get("step"), fields.get("epoch"), fields.get("step_limit")
        memory, gpu, gpu_memory = (fields.get(name) for name in ("memory", "gpu", "gpu_memory"))
        return cls(
            heard=heard,
            step=None if step is None else int(step),
            epoch=None if epoch is None else int(epoch),
            step_limit=None if limit is None else float(limit),
            memory=None if memory is None else int(memory),
            gpu=None if gpu is None else float(gpu),
            gpu_memory=None if gpu_memory is None else int(gpu_memory),
            taken=int(fields["taken"]),
            receiving=bool(fields["receiving"]),
            rows={str(name): int(count) for name, count in fields["rows"].items()},
            **words,
        )

    def place(self) -> str:
        """Describe the last step and the phase after it: `step 310, in gather`."""
        step = "" if self.step is None else f"step {self.step}"
        if self.epoch is not None and self.epoch > 1 and step:
            step = f"epoch {self.epoch}, {step}"
        return self.phase if step in self.phase else f"{step}, {self.phase}"


@dataclass(frozen=True)
class Verdict:
    """The ranks that are hung (`still`), and those that make progress, or may (`moving`)."""

    still: list[RankStatus]
    moving: list[RankStatus]


def judge(ranks: Iterable[RankStatus], limit: StallLimit, now: float) -> Verdict:
    """Decide which ranks are hung.

    A rank that shows its steps, or whose process is stopped, is hung when it made no progress for the limit. One that
    does not show its steps is hung only when it used nearly no CPU either, and no other rank makes progress, as it may
    be waiting for that one. A rank that waits for other ranks or for rows, or has returned, is never hung itself.
    """
    sure: list[RankStatus] = []
    idle: list[RankStatus] = []
    moving: list[RankStatus] = []
    for s in sorted(ranks, key=lambda s: s.rank):
        if s.finished or (s.doing in ("wait", "rows") and s.state != "T"):
            continue
        quiet, nothing = s.quiet + now - s.heard, s.idle + now - s.heard
        shown = s.step_limit is not None and quiet > max(limit.seconds, s.step_limit)
        if shown or (s.state == "T" and quiet > limit.seconds):
            sure.append(s)
        elif min(quiet, nothing) > limit.seconds:
            idle.append(s)
        else:
            moving.append(s)
    if moving:
        return Verdict(sure, moving)
    return Verdict(sorted(sure + idle, key=lambda s: s.rank), [])


def starved(ranks: Iterable[RankStatus], limit: StallLimit, now: float) -> RankStatus | None:
    """Return the rank with the fewest rows when none has arrived anywhere for the limit, and ranks wait for them.

    Returns None when rows arrive, or no rank waits for any.
    """
    ranks = list(ranks)
    receiving = [s for s in ranks if s.receiving]
    waits = any(s.doing == "rows" for s in ranks) or all(s.finished for s in ranks)
    if not receiving or not waits:
        return None
    if any(s.rows_quiet + now - s.heard <= limit.seconds for s in receiving):
        return None
    return min(receiving, key=lambda s: (sum(s.rows.values()), s.rank))


@dataclass(frozen=True)
class Answer:
    """The stacks of one rank, as its supervisor read them.

    text       : all of them.
    where      : the main thread's, in one line.
    collective : the name of the collective that it waits in.
    why        : the reason when there are none.
    calls      : the collectives that it has called, by group; None: it has not answered.
    """

    text: str = ""
    where: str = ""
    collective: str = ""
    why: str = ""
    calls: Sequence[CollectiveCalls] | None = None


NO_ANSWER = Answer(why="its supervisor does not answer")


def at_fault(ranks: Iterable[RankStatus], stuck: list[RankStatus], answers: Mapping[int, Answer]) -> list[RankStatus]:
    """Sort the ranks that are hung, wait or have returned; the one at fault comes first.

    At fault is a rank whose process is stopped; else the one at the lowest step; else one in no collective while others
    are in one. A rank that waits or has returned can be at fault only when all hung ranks are in a collective.
    """
    numbers = {s.rank for s in stuck}
    exchange = all(answers.get(s.rank, NO_ANSWER).collective for s in stuck)
    chosen = [s for s in ranks if s.rank in numbers or s.finished or s.doing in ("wait", "rows")]
    steps = any(s.taken for s in chosen)
    logged = all(s.step is not None for s in chosen)

    def key(s: RankStatus) -> tuple[Any, ...]:
        answer = answers.get(s.rank, NO_ANSWER)
        done = (s.taken,) if steps else (s.epoch or 0, s.step or 0) if logged else ()
        exchanging = bool(answer.collective) or (s.doing == "wait" and not s.finished)
        could = s.rank in numbers or (exchange and s.doing != "rows")
        return s.state != "T", not could, done, exchanging, s.rank not in numbers, s.rank

    return sorted(chosen, key=key)


def line(status: RankStatus, answer: Answer) -> str:
    """Describe one rank: `rank 2 (host b): step 309, in train() at train.py:42 → all_reduce (…)`."""
    where = answer.where or answer.why
    if status.finished:
        where = "its function has returned"
    place = status.place()
    return f"rank {status.rank} (host {status.host}): {place}{', ' if place and where else ''}{where}"


def describe_stall(
    first: RankStatus, order: list[RankStatus], others: list[RankStatus], answers: Mapping[int, Answer], now: float
) -> str:
    """Write the report of a hung rank: the one at fault, what the others wait for, and where every rank is."""
    stopped = f"; its process is {STATES[first.state]}" if first.state in ("T", "D") else ""
    ranks = [*order, *others]
    waits = list(awaited({s.rank: answers.get(s.rank, NO_ANSWER).calls for s in sorted(ranks, key=lambda s: s.rank)}))
    behind = "" if len(order) == 1 else _behind(first, order, answers)
    if len(order) > 1 and not behind and not any(wait.behind for wait in waits):
        behind = _together(order, others, answers)
    seconds = first.quiet + now - first.heard
    if first.finished:
        head = f"rank {first.rank} on {first.host} is not where the others wait: its function has returned"
    else:
        head = f"rank {first.rank} on {first.host} hangs: {first.place()}, no progress for {seconds:.1f} s{stopped}"
    calls = ["", *(wait.line() for wait in waits)] if waits else []
    lines = [line(status, answers.get(status.rank, NO_ANSWER)) for status in ranks]
    return "\n".join([f"{head}.{behind}", *calls, "", "Where the ranks are:", *(f"  {text}" for text in lines)])


def _behind(first: RankStatus, order: list[RankStatus], answers: Mapping[int, Answer]) -> str:
    others = [status for status in order if status.rank != first.rank]
    ahead = [status for status in others if status.taken > first.taken]
    waiting = [status for status in others if answers.get(status.rank, NO_ANSWER).collective]
    if answers.get(first.rank, NO_ANSWER).collective and not ahead:
        return ""
    if waiting:
        call, at = answers[waiting[0].rank].collective, waiting[0].place()
        who = f"ranks {', '.join(str(status.rank) for status in waiting)} wait"
        who = who if len(waiting) > 1 else f"rank {waiting[0].rank} waits"
        return f" It never reached the {call} in which {who} ({at})."
    if ahead:
        names = ", ".join(f"{status.rank} ({status.place()})" for status in ahead)
        return f" Ahead of it: rank {names}."
    return ""


def _together(order: list[RankStatus], others: list[RankStatus], answers: Mapping[int, Answer]) -> str:
    calls = {answers.get(status.rank, NO_ANSWER).collective for status in order}
    if others or len(calls) > 1 or not (call := calls.pop()):
        return ""
    return (
        f" All ranks wait in this {call}: what one sends does not reach another, or they disagree about what is sent. "
        "Look at the network between their hosts."
    )


def describe_starved(status: RankStatus, order: list[RankStatus], answers: Mapping[int, Answer], now: float) -> str:
    """Write the report of rows that don't arrive: how many there are, and where every rank is."""
    rows = ", ".join(f"{count:,} rows of {name!r}" for name, count in status.rows.items()) or "no rows"
    seconds = status.rows_quiet + now - status.heard
    waiting = [line(other, answers.get(other.rank, Answer())) for other in order]
    return "\n".join(
        [
            f"no rows came from the source for {seconds:.1f} s: rank {status.rank} on {status.host} has {rows} so far, "
            "and their end has not come. What Spark still computes of them hangs, or a disk or network that it reads "
            "from: see the running stages in the Spark UI.",
            "",
            "Where the ranks are:",
            *(f"  {text}" for text in waiting),
        ]
    )
