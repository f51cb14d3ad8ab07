"""The judge of random faults reports every violation, and nothing where all is as documented."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.faults import FIRST, LASTING, LOSSES, ORDER, PHASES, WEIGHTS, Fault, Plan, Struck
from chaos.outcomes import MAY, judge
from chaos.table import table

RIGHT = {"weights": "ab12", "history": [{"loss": 0.5}]}
KILLED = "rank 1 on vm (pid 77) was killed by SIGKILL: from outside, not for want of memory (peak 68.1 MB)"
STOPPED = "Rank 1 on vm hangs: step 3, no progress for 15.4 s; its process is stopped (SIGSTOP, or Ctrl-Z)."


def struck(kind: str, *pids: int) -> Struck:
    return Struck(Fault(kind, "steps", 1, 0.0, 0, 1.0), 0.0, list(pids))


def answer(value: Any = None, *, error: tuple[str, str] | None = None, left: tuple[str, ...] = ()) -> dict[str, Any]:
    told = {"kinds": [error[0]], "text": error[1], "facts": {}, "stack": ""} if error else None
    return {"value": value, "error": told, "left": list(left)}


def retry(reason: str) -> dict[str, Any]:
    return {"kind": "retry", "reason": reason}


FINE = {
    "nothing happened": (answer(RIGHT), [struck("connections cut")], [], 3),
    "tried again": (answer(RIGHT), [struck("rank killed", 77)], [retry(KILLED)], 3),
    "a driver that is gone": (None, [struck("driver killed", 5)], [], 3),
    "stopped for ever": (answer(error=("Stalled", STOPPED)), [struck("rank stopped", 77)], [], 3),
    "no retries": (answer(error=("RankFailed", f"{KILLED}.")), [struck("rank killed", 77)], [], 0),
    "no retries left": (
        answer(error=("RankFailed", f"{KILLED}.\n\nGiven up after 2 attempts (retries=1).")),
        [struck("rank killed", 77), struck("rank killed", 77)],
        [retry(KILLED)],
        1,
    ),
}
WRONG = {
    "other weights": (answer(RIGHT | {"weights": "ff"}), [struck("rank killed", 77)], [retry(KILLED)], 3, "weights is"),
    "a shorter history": (answer({"weights": "ab12"}), [], [], 3, "history is None"),
    "another was named": (answer(RIGHT), [struck("rank killed", 78)], [retry(KILLED)], 3, "that no fault explains"),
    "more retries than losses": (answer(RIGHT), [struck("rank killed", 77)], [retry(KILLED)] * 2, 3, "2 retries for 1"),
    "no loss at all": (answer(RIGHT), [struck("connections cut")], [retry(KILLED)], 3, "that no fault explains"),
    "an error of nothing": (answer(error=("JobFailed", "x")), [], [], 3, "an error that no fault explains"),
    "not tried again": (
        answer(error=("JobFailed", "EOFException")),
        [struck("daemon killed", 7)],
        [],
        3,
        "no fault explains",
    ),
    "another class": (answer(error=("OSError", KILLED)), [struck("rank killed", 77)], [], 0, "of another class"),
    "another cause": (
        answer(error=("RankFailed", "Rank 1 has ended.")),
        [struck("rank killed", 77)],
        [],
        0,
        "does not say so",
    ),
    "silent about attempts": (
        answer(error=("RankFailed", KILLED)),
        [struck("rank killed", 77), struck("rank killed", 77)],
        [retry(KILLED)],
        1,
        "does not tell of them",
    ),
    "left behind": (answer(RIGHT, left=("thread x",)), [], [], 3, "left behind: thread x"),
}


@pytest.mark.parametrize("case", FINE)
def test_what_the_docs_say_is_fine(case: str) -> None:
    told, faults, events, retries = FINE[case]
    assert judge(told, faults, events, retries, RIGHT).problems == []


@pytest.mark.parametrize("case", WRONG)
def test_what_they_do_not_say_is_found(case: str) -> None:
    told, faults, events, retries, said = WRONG[case]
    problems = judge(told, faults, events, retries, RIGHT).problems
    assert any(said in problem for problem in problems), problems


def test_a_seed_is_the_same_plan_in_every_process() -> None:
    code = "from chaos.faults import Plan; print(*map(Plan.of, range(50)), sep='\\n')"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip() == "\n".join(str(Plan.of(seed)) for seed in range(50))


def test_every_fault_hits_every_phase_that_it_can() -> None:
    drawn = {(fault.kind, fault.phase) for seed in range(6000) for fault in Plan.of(seed).faults}
    possible = {(kind, phase) for kind in WEIGHTS for phase in ORDER[FIRST.get(kind, 0) :]}
    assert drawn == possible
    assert set(MAY) == set(WEIGHTS)
    assert {*LOSSES, *LASTING, *FIRST} <= set(WEIGHTS)
    assert set(PHASES) == set(ORDER)


def test_the_table_counts_outcomes_by_fault_and_phase() -> None:
    figure = '{{"fault": "rank killed", "phase": "steps", "outcome": "{}", "seconds": {}, "seed": {}, "failed": {}}}'
    rows = table([figure.format("continued", 1.0, 1, "false"), figure.format("JobFailed", 3.0, 2, "true")])
    assert "| rank killed | steps | 2 | continued: 1, JobFailed: 1 | 2.0 s | 3.0 s |" in rows
    assert rows[-1] == "2 rounds with 2 faults that hit; failed: [2]"
