"""One round: a training is called, hit by the faults of its plan, and called again where one has ended it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusters import Workers

from .faults import PHASES, Fault, Plan, Progress, Struck, strike
from .ground import Ground
from .outcomes import judge

BOUND_SECONDS = 200.0  # of one call: three starts on a busy machine, and a stalled one
NOBODY_SECONDS = 3.0  # how long a fault waits for somebody whom it can hit
TOLD = ("note", "retry", "failed", "formed", "received", "checkpoint", "resumed", "rank_ended", "ended", "stored")


class Round:
    """A plan, executed on a ground. `problems` lists violations; `figures` is for the table."""

    def __init__(self, plan: Plan, ground: Ground, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.problems: list[str] = []
        self.figures: list[dict[str, Any]] = []
        self._ground = ground
        self._say = say
        self._began = time.monotonic()
        self._folder = ground.runs / f"{plan.seed}"
        self._to_come = list(plan.faults)

    def play(self) -> None:
        """Play the whole round."""
        try:
            self._play()
        except TimeoutError as late:
            self.problems.append(f"{late}:\n{self._ground.dump()}")
        self.problems += [f"left behind: {what}" for what in self._ground.left()]
        shutil.rmtree(self._folder, ignore_errors=True)

    def _play(self) -> None:
        reference = self._reference()
        self._began = time.monotonic()
        calls, again = 0, True
        while again and not self.problems:
            calls += 1
            again = self._call(reference, calls)
        if not self.problems:
            self._tell("does the session still work?")
            self._ground.driver().ask("meet")
            met = self._ground.driver().wait(120.0)
            if met["value"] != [[[0, 1], [0, 1]], 10]:
                self.problems.append(f"the session no longer works: {met}")

    def _tell(self, text: str) -> None:
        self._say(f"  {time.monotonic() - self._began:7.3f} s  {text}")

    def _reference(self) -> Mapping[str, Any]:
        """Return the result of the undisturbed training, computed once per ground."""
        training = self.plan.training
        if training not in self._ground.references:
            self._tell(f"the reference of {training!r}")
            run_dir = self._ground.runs / f"reference-{self.plan.seed}"
            answer, _ = self._watched(run_dir, 2, [])
            assert answer is not None, self._ground.driver().tail()
            assert answer["error"] is None, answer["error"]
            assert not answer["left"], answer["left"]
            self._ground.references[training] = answer["value"]
            shutil.rmtree(run_dir)
        return self._ground.references[training]

    def _watched(self, run_dir: Path, retries: int, to_come: list[Fault]) -> tuple[dict[str, Any] | None, Call]:
        """Call the training, and follow it to its end. Raises TimeoutError when it takes too long."""
        marks, driver = self._ground.folder / f"{run_dir.name}.marks", self._ground.driver()
        call = Call(self._ground, Progress(run_dir, marks, self._ground))
        driver.ask("train", training=self.plan.training, run_dir=str(run_dir), marks=str(marks), retries=retries)
        try:
            return call.run(to_come, self._tell), call
        finally:
            call.end_faults(self._tell)

    # ---- one call

    def _call(self, reference: Mapping[str, Any], number: int) -> bool:
        """Call the training once. Return whether to call it again."""
        retries = self.plan.retries if self._to_come or number == 1 else 2
        self._tell(f"call {number}, retries={retries}")
        answer, call = self._watched(self._folder, retries, self._to_come)
        killed = any(one.fault.kind == "driver killed" for one in call.struck)
        if answer is None and not killed:
            self.problems.append(f"the driver ended by itself:\n{self._ground.driver().tail()}")
        if answer is None or killed:
            self.problems += [f"left behind: {what}" for what in self._ground.driver_is_dead()]
        verdict = judge(answer, call.struck, call.new_events(), retries, reference)
        self.problems += verdict.problems
        self._tell(f"call {number}: {verdict.words}")
        if answer is not None and answer["error"] is not None:
            self._say(answer["error"]["text"])
            self._to_come = []  # the same call continues from there, and nothing disturbs it
        self._note(call, verdict.words)
        if self._ground.kind == "standalone":
            while sum(process.poll() is None for process in Workers.here.processes) < 2:
                self._ground.start_worker()
        return answer is None or answer["error"] is not None

    def _note(self, call: Call, outcome: str) -> None:
        for one in call.struck:
            self.figures.append(
                {
                    "fault": one.fault.kind,
                    "phase": one.fault.phase,
                    "outcome": outcome,
                    "seconds": round(call.seconds_until_seen(one), 3),
                    "seed": self.plan.seed,
                }
            )


class Call:
    """One running call, which is watched and hit."""

    def __init__(self, ground: Ground, progress: Progress) -> None:
        self.progress = progress
        self.struck: list[Struck] = []
        self._ground = ground
        self._over = 0.0
        progress.look()  # of an earlier call, in the same run directory
        progress.from_now()
        self._before = len(progress.events)

    def new_events(self) -> list[dict[str, Any]]:
        """Return the new events of this call."""
        return [event for _, event in self.progress.events[self._before :]]

    def run(self, to_come: list[Fault], tell: Callable[[str], None]) -> dict[str, Any] | None:
        """Run until there is an answer, or (None) the driver is dead. Removes the faults done from the list."""
        driver, deadline = self._ground.driver(), time.monotonic() + BOUND_SECONDS
        due: float | None = None
        while True:
            try:
                answer = driver.answer(0.005)
            except EOFError:
                answer, driver_gone = None, True
            else:
                driver_gone = False
            now = time.monotonic()
            for event in self.progress.look():
                if event["kind"] in TOLD:
                    tell(f"  {event['kind']}: {_brief(event)}")
            if answer is not None or driver_gone:
                self._over = now
                return answer
            if now > deadline:
                raise TimeoutError(f"the training has neither returned nor raised within {BOUND_SECONDS:.0f} s")
            self._end(now, tell)
            if to_come:
                fault = to_come[0]
                if due is None and PHASES[fault.phase].reached(self.progress, fault.number):
                    due = now + fault.delay
                if due is not None and now >= due:
                    done = strike(fault, self._ground, self.progress)
                    if done is not None:
                        tell(f"{fault.kind} (pids {done.pids}), in {fault.phase}")
                        self.struck.append(done)
                        self.progress.from_now()
                    elif now < due + NOBODY_SECONDS:
                        continue
                    else:
                        tell(f"{fault.kind}: there is nobody whom it could hit")
                    due = None
                    del to_come[0]

    def _end(self, now: float, tell: Callable[[str], None]) -> None:
        for one in self.struck:
            if one.end is not None and one.until is not None and now >= one.until:
                tell(f"{one.fault.kind}: over")
                end, one.end = one.end, None
                end()

    def end_faults(self, tell: Callable[[str], None]) -> None:
        """End all faults that still last."""
        for one in self.struck:
            one.until = one.until if one.until is not None else 0.0
        self._end(float("inf"), tell)

    def seconds_until_seen(self, one: Struck) -> float:
        """Return the seconds from the fault until the run was retried, or the call ended."""
        seen = (at for at, event in self.progress.events if event["kind"] == "retry" and at > one.at)
        return min([*seen, self._over or time.monotonic()]) - one.at


def _brief(event: Mapping[str, Any]) -> str:
    kept = {
        key: value
        for key, value in event.items()
        if key not in ("time", "kind", "peers", "fingerprint", "log", "path", "bytes")
    }
    return str(kept.get("text") or json.dumps(kept))[:300]
