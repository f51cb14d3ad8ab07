"""Which ranks stand still, which of them is at fault, and the story of it (driver, or the first supervisor)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tritium.gang.supervisor.process_stats import STATES

if TYPE_CHECKING:
    from tritium.gang.settings import Gang

LEAST = 60.0  # seconds: a limit by the run's own steps is never shorter
STEPS = 100  # median steps, after which a rank that does nothing stands still


@dataclass(frozen=True)
class Patience:
    """How long a rank may stand still. `own_pace` says that the limit follows the run's steps once there are some."""

    timeout: float
    end: bool = True
    own_pace: bool = False

    @classmethod
    def of(cls, gang: Gang) -> Patience:
        """As the settings say. A limit that was given is kept as it is."""
        default = type(gang).__dataclass_fields__["stall_timeout"].default
        return cls(gang.stall_timeout, gang.on_stall == "end", gang.stall_timeout == default)

    @property
    def look_seconds(self) -> float:
        """How often to look, and to tell: four times within the limit, and once a second is enough."""
        return max(0.05, min(1.0, self.timeout / 4))

    def short(self, pace: float | None) -> float:
        """The limit for a rank that does nothing at all in the middle of its steps, of `pace` seconds each."""
        return min(self.timeout, max(LEAST, STEPS * pace)) if self.own_pace and pace is not None else self.timeout


@dataclass
class Standing:
    """What is known of one rank: its supervisor's last word, `heard` when. All seconds are as of then."""

    heard: float
    step: int | None = None
    epoch: int | None = None
    doing: str = "other"
    phase: str = "starting"
    seconds: float = 0.0
    quiet: float = 0.0
    """Since its last progress."""
    idle: float = 0.0
    """Since its process last used CPU."""
    taken: int = 0
    pace: float | None = None
    patience: float | None = None
    """Beyond it, a busy rank that shows no step stands still; None when it never shows its steps."""
    state: str = ""
    rows: dict[str, int] = field(default_factory=dict)
    receiving: bool = False
    rows_quiet: float = 0.0
    """Since the last row came, or Spark was busy with them."""

    @classmethod
    def read(cls, fields: Mapping[str, Any], heard: float) -> Standing:
        """From a pulse message."""
        words: dict[str, Any] = {name: str(fields[name]) for name in ("doing", "phase", "state")}
        words |= {name: float(fields[name]) for name in ("seconds", "quiet", "idle", "rows_quiet")}
        step, epoch, pace = fields.get("step"), fields.get("epoch"), fields.get("pace")
        own = fields.get("patience")
        return cls(
            heard=heard,
            step=None if step is None else int(step),
            epoch=None if epoch is None else int(epoch),
            pace=None if pace is None else float(pace),
            patience=None if own is None else float(own),
            taken=int(fields["taken"]),
            receiving=bool(fields["receiving"]),
            rows={str(name): int(count) for name, count in fields["rows"].items()},
            **words,
        )

    def place(self) -> str:
        """`step 310, in gather`: the last step, and what came after it."""
        step = "" if self.step is None else f"step {self.step}"
        if self.epoch is not None and self.epoch > 1 and step:
            step = f"epoch {self.epoch}, {step}"
        return self.phase if step in self.phase else f"{step}, {self.phase}"


@dataclass(frozen=True)
class Seat:
    """One rank, its host, and how it stands. `finished`: its function has returned."""

    rank: int
    host: str
    standing: Standing
    finished: bool = False


@dataclass(frozen=True)
class Verdict:
    """Of all ranks: those that stand still; those that seem to, while others are busy; and those that move or may."""

    still: list[Seat]
    doubtful: list[Seat]
    moving: list[Seat]


def judge(seats: Iterable[Seat], patience: Patience, now: float) -> Verdict:
    """How the ranks stand.

    One that shows its steps, or whose process is stopped, stands still when it made no progress for the limit. Two
    kinds do only when no other rank moves, for they may wait for it: one that does not show its steps, and used
    nearly no CPU either; and one that did nothing at all for the shorter limit of the run's own steps. When the others
    made no progress for that limit either, but use CPU, as ranks that wait in NCCL do, the latter is in doubt.
    A rank that waits for the others, or for rows, or has returned, does none of this: something else is at fault.
    """
    sure: list[Seat] = []
    idle: list[Seat] = []
    short_of: list[Seat] = []
    busy: list[Seat] = []
    moving: list[Seat] = []
    for seat in sorted(seats, key=lambda seat: seat.rank):
        s = seat.standing
        if seat.finished or (s.doing in ("wait", "rows") and s.state != "T"):
            continue
        quiet, nothing = s.quiet + now - s.heard, s.idle + now - s.heard
        short = patience.short(s.pace) if s.doing == "step" else patience.timeout
        shown = s.patience is not None
        if (s.patience is not None and quiet > max(patience.timeout, s.patience)) or (s.state == "T" and quiet > short):
            sure.append(seat)
        elif min(quiet, nothing) > short:
            (short_of if shown else idle).append(seat)
        elif shown and quiet > short:
            busy.append(seat)
        else:
            moving.append(seat)
    if moving:
        return Verdict(sure, [], [*busy, *moving])
    if busy:
        return Verdict(sure, short_of, busy)
    return Verdict(sorted(sure + idle + short_of, key=lambda seat: seat.rank), [], [])


def starved(seats: Iterable[Seat], patience: Patience, now: float) -> Seat | None:
    """The rank for which no row has come for the limit, while ranks wait for rows; None when rows come or none waits.

    Of several the one with the fewest rows.
    """
    seats = list(seats)
    receiving = [seat for seat in seats if seat.standing.receiving]
    waits = any(s.standing.doing == "rows" for s in seats) or all(seat.finished for seat in seats)
    if not receiving or not waits:
        return None
    if any(seat.standing.rows_quiet + now - seat.standing.heard <= patience.timeout for seat in receiving):
        return None
    return min(receiving, key=lambda seat: (sum(seat.standing.rows.values()), seat.rank))


@dataclass(frozen=True)
class Answer:
    """The stacks of one rank as its supervisor read them: `where` is its main thread's in one line, `collective`
    the exchange of the ranks that it waits in, and `why` why there are none."""

    text: str = ""
    where: str = ""
    collective: str = ""
    why: str = ""


NO_ANSWER = Answer(why="its supervisor does not answer")


def at_fault(seats: Iterable[Seat], stuck: list[Seat], answers: Mapping[int, Answer]) -> list[Seat]:
    """Every rank that stands still, waits or has returned; first the one that the others wait for.

    That is: a process that can't run; then the lowest step; then a rank that is in no exchange while others are in one.
    One that waits or has returned can only be at fault when all that stand still are in an exchange.
    """
    ranks = {seat.rank for seat in stuck}
    exchange = all(answers.get(seat.rank, NO_ANSWER).collective for seat in stuck)
    chosen = [s for s in seats if s.rank in ranks or s.finished or s.standing.doing in ("wait", "rows")]
    steps = any(seat.standing.taken for seat in chosen)
    logged = all(seat.standing.step is not None for seat in chosen)

    def key(seat: Seat) -> tuple[Any, ...]:
        s, answer = seat.standing, answers.get(seat.rank, NO_ANSWER)
        done = (s.taken,) if steps else (s.epoch or 0, s.step or 0) if logged else ()
        exchanging = bool(answer.collective) or (s.doing == "wait" and not seat.finished)
        could = seat.rank in ranks or (exchange and s.doing != "rows")
        return s.state != "T", not could, done, exchanging, seat.rank not in ranks, seat.rank

    return sorted(chosen, key=key)


def line(seat: Seat, answer: Answer) -> str:
    """`rank 2 (host b): step 309, in train() at train.py:42 → all_reduce (…)`."""
    where = answer.where or answer.why
    if seat.finished:
        where = "its function has returned"
    place = seat.standing.place()
    return f"rank {seat.rank} (host {seat.host}): {place}{', ' if place and where else ''}{where}"


def why_no_answer(state: str) -> str:
    """Why a rank's process did not write its stacks."""
    return f"its process is {STATES.get(state, 'running, but does not answer a signal')}"


def story(first: Seat, order: list[Seat], others: list[Seat], answers: Mapping[int, Answer], now: float) -> str:
    """What stands still, and where every rank is; those behind first."""
    s = first.standing
    stopped = f"; its process is {STATES[s.state]}" if s.state in ("T", "D") else ""
    behind = "" if len(order) == 1 else _behind(first, order, answers) or _together(order, others, answers)
    seconds = s.quiet + now - s.heard
    if first.finished:
        head = f"rank {first.rank} on {first.host} is not where the others wait: its function has returned"
    else:
        head = f"rank {first.rank} on {first.host} stands still: {s.place()}, no progress for {seconds:.1f} s{stopped}"
    lines = [line(seat, answers.get(seat.rank, NO_ANSWER)) for seat in [*order, *others]]
    return "\n".join([f"{head}.{behind}", "", "Where the ranks are:", *(f"  {text}" for text in lines)])


def _behind(first: Seat, order: list[Seat], answers: Mapping[int, Answer]) -> str:
    others = [seat for seat in order if seat.rank != first.rank]
    ahead = [seat for seat in others if seat.standing.taken > first.standing.taken]
    waiting = [seat for seat in others if answers.get(seat.rank, NO_ANSWER).collective]
    if answers.get(first.rank, NO_ANSWER).collective and not ahead:
        return ""
    if waiting:
        call, at = answers[waiting[0].rank].collective, waiting[0].standing.place()
        who = f"ranks {', '.join(str(seat.rank) for seat in waiting)} wait"
        who = who if len(waiting) > 1 else f"rank {waiting[0].rank} waits"
        return f" It never reached the {call} in which {who} ({at})."
    if ahead:
        names = ", ".join(f"{seat.rank} ({seat.standing.place()})" for seat in ahead)
        return f" Ahead of it: rank {names}."
    return ""


def _together(order: list[Seat], others: list[Seat], answers: Mapping[int, Answer]) -> str:
    calls = {answers.get(seat.rank, NO_ANSWER).collective for seat in order}
    if others or len(calls) > 1 or not (call := calls.pop()):
        return ""
    return (
        f" All ranks wait in this {call}: what one sends does not reach another, or they disagree about what is sent. "
        "Look at the network between their hosts."
    )


def starved_story(seat: Seat, order: list[Seat], answers: Mapping[int, Answer], now: float) -> str:
    """No rows come, and who waits for what."""
    s = seat.standing
    rows = ", ".join(f"{count:,} rows of {name!r}" for name, count in s.rows.items()) or "no rows"
    seconds = s.rows_quiet + now - s.heard
    waiting = [line(each, answers.get(each.rank, Answer())) for each in order]
    return "\n".join(
        [
            f"no rows came from the source for {seconds:.1f} s: rank {seat.rank} on {seat.host} has {rows} so far, and "
            "their end has not come. What Spark still computes of them stands still, or a disk or network that it "
            "reads from: see the running stages in the Spark UI.",
            "",
            "Where the ranks are:",
            *(f"  {text}" for text in waiting),
        ]
    )
