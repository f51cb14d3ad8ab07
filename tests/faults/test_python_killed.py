"""A process above a rank is killed (supervisor, Spark's Python daemon, executor): the run ends, names it, retries."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import tritium as tr
from bounds import timed
from clusters import wait
from ranks import supervisor

STEPS = 6
STAYS = 3  # the first attempt goes no further
CASES = [
    ("local", "fork server killed"),
    ("local", "supervisor killed"),
    ("local", "Spark's Python daemon killed"),
    ("local-cluster", "fork server killed"),
    ("local-cluster", "supervisor killed"),
    ("local-cluster", "Spark's Python daemon killed"),
    ("local-cluster", "executor killed"),
]


def train(place: str) -> list[int]:
    """Save at every step."""
    world = tr.world()
    found = world.checkpoint.load()
    begin = 0 if found is None else found.step
    for step in range(begin + 1, STEPS + 1):
        world.checkpoint.save({"step": step}, step)
        world.checkpoint.wait()
        world.barrier()
        if found is None and step == STAYS:
            Path(place, f"pid-{os.getpid()}-{supervisor()}").touch()
            while world.gather(True):
                time.sleep(0.05)
    return world.gather(begin)


FAULTS = {
    "fork server killed": "was killed by SIGKILL",
    "supervisor killed": "its supervisor, a Python worker of Spark's, was killed or crashed: probably out of memory",
    "Spark's Python daemon killed": "Spark's Python daemon there (pid ",
    "executor killed": "ExecutorLostFailure",
}  # in the order in which they are above a rank


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("cluster", "fault"), CASES, indirect=["cluster"])
def test_what_a_rank_runs_in_is_killed(cluster: Any, fault: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    problems: list[BaseException] = []

    def kill() -> None:
        wait(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "both ranks run")
        pids = [file.name.split("-")[1:] for file in tmp_path.glob("pid-*")]
        ranks, supervisors = ([psutil.Process(int(pid)) for pid in each] for each in zip(*pids, strict=True))
        above = [ranks[0].parent(), supervisors[0], *supervisors[0].parents()]
        with timed(fault):
            victim = above[list(FAULTS).index(fault)]
            below = [victim, *victim.children(recursive=True)]  # any other supervisor becomes an idle worker of Spark's
            victim.kill()
            gone = [supervisor for supervisor in supervisors if supervisor in below]
            _, left = psutil.wait_procs([*ranks, *gone], 12)
        assert not left, left

    def accomplice() -> None:
        try:
            kill()
        except BaseException as problem:  # noqa: BLE001 - the test's own thread raises it
            problems.append(problem)

    thread = threading.Thread(target=accomplice)
    thread.start()
    try:
        results = tr.launch(
            train, ranks=2, args=(str(tmp_path),), run_dir=str(run), spark=cluster.spark, progress=False, output="none"
        )
    finally:
        thread.join()
    assert problems == []
    assert results == [[STAYS, STAYS]] * 2
    report = json.loads(run.joinpath("report.json").read_text())
    (retry,) = report["retries"]
    assert re.match(rf"rank \d on \S+ (was lost:|\(pid \d+\)) {re.escape(FAULTS[fault])}", retry["reason"]), retry[
        "reason"
    ]
    assert len(retry["reason"]) < 300
    assert any(note.endswith(f"Retry 1 of 2, from the checkpoint of step {STAYS}") for note in report["notes"])
    assert cluster.spark.range(10).count() == 10
