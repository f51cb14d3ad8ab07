"""The bound on the time from each fault to its outcome, and the times measured: `make faults` prints the table.

A bound is a promise to users (docs/failures.md): a test waits for the outcome with a limit, and records how long it
took. `make faults` enforces the bounds; `make test`, which runs other tests beside it on two cores, allows twice as
long.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

# fault -> seconds from the fault to its outcome
BOUNDS = {
    "rank raises": 2.0,
    "driver killed, on='driver'": 10.0,
    "driver killed, local-cluster": 10.0,
    "rank killed or left": 2.0,
    "fork server killed": 2.0,
    "job cancelled": 5.0,
    "session stopped": 5.0,
    "Ctrl-C": 5.0,
    "driver killed, supervisors of their own": 10.0,
    "control server gone for good": 10.0,
    "silent control connection": 15.0,
    "host's network cut": 15.0,
    "Spark's Python daemon killed": 10.0,
    "supervisor killed": 10.0,
    "executor killed": 5.0,
    "one direction of a host's network cut": 20.0,
}


def within(fault: str, seconds: float) -> None:
    """Record the seconds that the fault's outcome took, and fail beyond its bound."""
    if name := os.environ.get("TRITIUM_FAULT_FIGURES"):  # a path
        with open(name, "a", encoding="utf-8") as file:  # one short write is atomic between test processes
            file.write(json.dumps({"fault": fault, "seconds": round(seconds, 3)}) + "\n")
    bound = BOUNDS[fault] * (1 if "TRITIUM_FAULT_ROUNDS" in os.environ else 2)
    assert seconds <= bound, f"{fault}: took {seconds:.1f} s, promised are {BOUNDS[fault]:g} s"


@contextmanager
def timed(fault: str) -> Iterator[None]:
    """Measure the block, which begins at the fault and ends with its outcome."""
    began = time.monotonic()
    yield
    within(fault, time.monotonic() - began)


def table(lines: list[str]) -> list[str]:
    """Return the figures as rows of Markdown: bound, median, worst and number of runs of each fault."""
    figures: dict[str, list[float]] = {}
    for line in lines:
        entry = json.loads(line)
        figures.setdefault(entry["fault"], []).append(entry["seconds"])
    rows = ["| fault | bound | median | worst | runs |", "|---|---|---|---|---|"]
    for fault in filter(figures.__contains__, BOUNDS):
        found = figures[fault]
        median = statistics.median(found)
        rows.append(f"| {fault} | {BOUNDS[fault]:g} s | {median:.1f} s | {max(found):.1f} s | {len(found)} |")
    return rows
