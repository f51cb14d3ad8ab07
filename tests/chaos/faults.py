"""The faults done to a run: a plan drawn from a seed, the phases of a run, and the faults themselves."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from clusters import Workers

from .ground import KINDS, Ground

TRAININGS = ("dropout", "batch norm", "sharded", "no checkpoints", "function")
LACKS = {"no checkpoints": ("checkpoint", "validation"), "function": ("validation",)}  # phases that never come


# ---- what a run has reached, as it is seen from outside


class Progress:
    """The events in the run directory and the marks of the ranks; those since the last fault count for phases."""

    def __init__(self, run_dir: Path, marks: Path, ground: Ground) -> None:
        self.run_dir = run_dir
        self.marks_file = marks
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.marks: list[str] = []
        self._ground = ground
        self._offsets = {"events": 0, "marks": 0}
        self._seen_events = self._seen_marks = 0
        self._looked = 0.0

    def look(self) -> list[dict[str, Any]]:
        """Read on. Return the new events."""
        found = [json.loads(line) for line in self._lines("events", self.run_dir / "events.jsonl")]
        self.events += [(time.monotonic(), event) for event in found]
        self.marks += self._lines("marks", self.marks_file)
        return found

    def _lines(self, name: str, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[name])
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[name] += len(whole)
        return whole.decode(errors="replace").splitlines()

    def from_now(self) -> None:
        """Record that a fault was done: only later events count for phases."""
        self._seen_events, self._seen_marks = len(self.events), len(self.marks)

    def count(self, kind: str) -> int:
        """Return the number of events of this kind."""
        return sum(event["kind"] == kind for _, event in self.events[self._seen_events :])

    def marked(self, mark: str) -> int:
        """Return the number of marks of this kind, of all ranks."""
        return self.marks[self._seen_marks :].count(mark)

    def imports(self) -> bool:
        """Return whether a rank has started, and the gang is not complete yet."""
        told = [event["kind"] for _, event in self.events if event["kind"] in ("started", "formed")]
        if told[-1:] != ["started"] or time.monotonic() - self._looked < 0.1:
            return False
        self._looked = time.monotonic()
        roles = self._ground.roles()
        return bool(roles["rank"] or roles["fork server"])

    def saves(self) -> bool:
        """Return whether a checkpoint is being written."""
        folder = self.run_dir / "checkpoints"
        with contextlib.suppress(OSError):
            return any(not (entry / "manifest.json").exists() for entry in folder.iterdir())
        return False


@dataclass(frozen=True)
class Phase:
    """A part of a run: `reached` tells whether it has begun (for the `number`-th time)."""

    reached: Callable[[Progress, int], bool]
    most: int = 1
    """The largest number that is drawn."""
    delay: float = 0.2
    """The longest time from there to the fault."""


PHASES = {
    "submitting": Phase(lambda run, n: True, delay=1.0),
    "starting": Phase(lambda run, n: run.count("started") >= n, delay=1.5),
    "supervisors": Phase(lambda run, n: run.count("reported") >= n, most=2, delay=0.3),
    "imports": Phase(lambda run, n: run.imports(), delay=2.0),
    "forming": Phase(lambda run, n: run.count("formed") >= n, delay=0.3),
    "rows": Phase(lambda run, n: run.count("received") >= n, delay=0.3),
    "steps": Phase(lambda run, n: run.marked("step") >= n, most=40, delay=0.05),
    "validation": Phase(lambda run, n: run.marked("validation") >= n, most=20, delay=0.02),
    "between epochs": Phase(lambda run, n: run.marked("epoch") >= n, most=6, delay=0.03),
    "checkpoint": Phase(lambda run, n: run.saves() if n % 2 else run.count("checkpoint") >= n, most=6, delay=0.03),
    "storing": Phase(lambda run, n: run.marked("trained") >= n, most=2, delay=0.04),
    "leaving": Phase(lambda run, n: run.count("rank_ended") >= n, most=2, delay=0.3),
}
ORDER = list(PHASES)


# ---- the plan of a round


@dataclass(frozen=True)
class Fault:
    """One thing that is done to a run."""

    kind: str
    phase: str
    number: int
    delay: float
    victim: int
    """Which of those that are there, modulo their number."""
    seconds: float
    """How long it lasts, where it ends by itself."""

    def __str__(self) -> str:
        """Return the fault as a line of the plan."""
        lasting = f" for {self.seconds:.1f} s" if self.kind in LASTING else ""
        return f"{self.kind}{lasting}, {self.delay:.3f} s after {self.phase} ({self.number}), victim {self.victim}"


@dataclass(frozen=True)
class Plan:
    """The faults that one seed stands for."""

    seed: int
    kind: str
    training: str
    retries: int
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        """The name of the plan in a test's id."""
        return f"{self.kind}-{self.training.replace(' ', '_')}-{self.seed}"

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return the plan of the seed alone, the same in every process; odd seeds are standalone."""
        kind, chance = KINDS[seed % len(KINDS)], random.Random(f"tritium chaos {seed}")
        training = chance.choice(TRAININGS)
        faults: list[Fault] = []
        for _ in range(chance.choice((1, 1, 2, 2, 3))):
            first = 0 if not faults or faults[-1].kind in LOSSES else ORDER.index(faults[-1].phase) + 1
            if first < len(ORDER):  # an attempt that continues does not come back to what lies behind it
                faults.append(cls._fault(chance, kind, training, first))
        retries = chance.choice((3, 3, 3, 3, 3, 1, 0))
        return cls(seed, kind, training, retries, tuple(faults))

    @staticmethod
    def _fault(chance: random.Random, kind: str, training: str, first: int) -> Fault:
        kinds = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
        what = chance.choice([name for name in kinds if kind == "standalone" or name != "node killed"])
        first = max(first, FIRST.get(what, 0))
        phase = chance.choice([name for name in ORDER[first:] if name not in LACKS.get(training, ())])
        return Fault(
            what,
            phase,
            number=chance.randint(1, PHASES[phase].most),
            delay=chance.uniform(0, PHASES[phase].delay),
            victim=chance.randrange(4),
            seconds=round(chance.uniform(*LASTING.get(what, (0.0, 0.0))), 2),
        )

    def __str__(self) -> str:
        """Return every fault on a line."""
        lines = [f"seed {self.seed}: {self.training!r} on {self.kind}, retries={self.retries}"]
        return "\n".join(lines + [f"  {number}. {fault}" for number, fault in enumerate(self.faults, 1)])


# ---- the faults


WEIGHTS = {
    "rank killed": 3,
    "fork server killed": 2,
    "supervisor killed": 3,
    "daemon killed": 3,
    "executor killed": 2,
    "node killed": 3,
    "driver killed": 2,
    "rank stopped": 1,
    "rank stopped for a while": 2,
    "connections cut": 1,
    "connections refused": 1,
    "connections silent": 1,
    "scratch disk full": 2,
    "run directory's disk full": 1,
}
FIRST = {
    "rank killed": ORDER.index("imports"),
    "fork server killed": ORDER.index("imports"),
    "rank stopped": ORDER.index("imports"),
    "rank stopped for a while": ORDER.index("imports"),
    "supervisor killed": ORDER.index("starting"),
    "daemon killed": ORDER.index("submitting"),
    "connections cut": ORDER.index("starting"),
    "connections refused": ORDER.index("starting"),
    "connections silent": ORDER.index("starting"),
}  # before these phases there is nobody to be hit
LASTING = {
    "rank stopped for a while": (0.2, 4.0),
    "connections refused": (0.2, 5.0),
    "connections silent": (0.2, 5.0),
    "scratch disk full": (0.5, 6.0),
    "run directory's disk full": (0.5, 6.0),
    "node killed": (0.0, 5.0),
}  # seconds until it ends by itself; a machine comes back
LOSSES = (
    "rank killed",
    "fork server killed",
    "supervisor killed",
    "daemon killed",
    "executor killed",
    "node killed",
    "driver killed",
)
ROLE = {
    "rank killed": "rank",
    "fork server killed": "fork server",
    "rank stopped": "rank",
    "rank stopped for a while": "rank",
    "supervisor killed": "supervisor",
    "daemon killed": "daemon",
    "executor killed": "executor",
}


@dataclass
class Struck:
    """A fault that was done."""

    fault: Fault
    at: float
    pids: list[int] = field(default_factory=list)
    rank: int | None = None
    """The number of the rank that was hit, or whose supervisor was, where it had one."""
    end: Callable[[], None] | None = None
    """Ends it, where it does not end by itself."""
    until: float | None = None


def strike(fault: Fault, ground: Ground, run: Progress) -> Struck | None:
    """Do the fault now. Return None where there is no process (yet) to hit."""
    if role := ROLE.get(fault.kind):
        return _signal(fault, ground, run, role)
    struck = Struck(fault, time.monotonic())
    if fault.kind in LASTING:
        struck.until = struck.at + fault.seconds
    if fault.kind == "driver killed":
        struck.pids = [ground.driver().process.pid]
        ground.kill_driver()
    elif fault.kind == "node killed":
        living = [number for number, process in enumerate(Workers.here.processes) if process.poll() is None]
        number = living[fault.victim % len(living)]
        struck.pids = [Workers.here.processes[number].pid]
        Workers.here.kill(number)
        struck.end = ground.start_worker
    elif fault.kind == "connections cut":
        ground.driver().ask("connections", how="cut", arguments=[])
    elif fault.kind in ("connections refused", "connections silent"):
        driver, how = ground.driver(), "refuse" if fault.kind == "connections refused" else "freeze"
        driver.ask("connections", how=how, arguments=[True])
        struck.end = lambda: driver.ask("connections", how=how, arguments=[False])
    elif fault.kind == "scratch disk full":
        struck.end = fill(ground.scratch)
    elif fault.kind == "run directory's disk full":
        struck.end = fill(ground.runs)
    return struck


def _signal(fault: Fault, ground: Ground, run: Progress, role: str) -> Struck | None:
    """Send a signal to one process of a role; of the supervisors, to one of this gang where that is known."""
    there = ground.roles()[role]
    if role == "supervisor":
        reported = {event["pid"] for _, event in run.events if event["kind"] == "reported"}
        there = [process for process in there if process.pid in reported] or there
    if not there:
        return None
    process = there[fault.victim % len(there)]
    struck = Struck(fault, time.monotonic(), [process.pid])
    try:
        process.send_signal(signal.SIGKILL if fault.kind in LOSSES else signal.SIGSTOP)
    except psutil.NoSuchProcess:
        return None
    if fault.kind == "rank stopped for a while":
        struck.until = struck.at + fault.seconds

    def resume() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)

    struck.end = resume if role == "rank" and fault.kind not in LOSSES else None
    return struck


def fill(folder: Path) -> Callable[[], None]:
    """Fill this disk, if it is a small one of its own. Return a function that frees it."""
    ballast = folder / "spark-ballast"  # a name that no one takes for something that a run has left
    if not os.path.ismount(folder):
        return lambda: None
    with ballast.open("wb", buffering=0) as file:
        for piece in (1 << 20, 4096):  # the latter also for what was given back meanwhile
            with contextlib.suppress(OSError):
                while file.write(bytes(piece)):
                    pass
    return lambda: ballast.unlink(missing_ok=True)
