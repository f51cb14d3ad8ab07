"""Spark Connect behind a firewall: the coordinator runs in a supervisor, and failures there are still reported here."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest

import tritium as tr
from clusters import free_port, wait
from ranks import supervisor
from tritium.errors import RankFailed, Stalled
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.driver import attempt

pytestmark = [pytest.mark.timeout(150), pytest.mark.parametrize("cluster", ["connect"], indirect=True)]


class Walled(Coordinator):
    """A coordinator that no executor can reach."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.address = ("127.0.0.1", free_port())


@pytest.fixture(autouse=True)
def _wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "Coordinator", Walled)


def launch(cluster: Any, function: Callable[..., Any], run: Path, *args: Any, **settings: Any) -> list[Any]:
    quiet: dict[str, Any] = {"ranks": 2, "progress": False, "output": "none"}
    return tr.launch(function, args=args, spark=cluster.spark, run_dir=str(run), **{**quiet, **settings})


def saves(place: str) -> list[int]:
    """Save a checkpoint, report it, and stay; the second time continue from there."""
    world = tr.world()
    found = world.checkpoint.load()
    if found is None:
        world.checkpoint.save({"step": 1}, 1)
        world.checkpoint.wait()
        Path(place, f"pid-{world.rank}-{os.getpid()}-{supervisor()}").touch()
        while world.gather(True):
            time.sleep(0.05)
    return world.gather(0 if found is None else found.step)


CRASHED = "a Python worker of Spark's, was killed or crashed"


@pytest.mark.parametrize(("what", "rank"), [("rank", 1), ("supervisor", 0), ("supervisor", 1)])
def test_what_is_killed_is_named_and_the_gang_starts_again(cluster: Any, what: str, rank: int, tmp_path: Path) -> None:
    def kill() -> None:
        wait(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "both ranks run", 60)
        (file,) = tmp_path.glob(f"pid-{rank}-*")
        _, _, own, above = file.name.split("-")
        psutil.Process(int(own if what == "rank" else above)).kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        assert launch(cluster, saves, tmp_path / "run", str(tmp_path)) == [[1, 1]] * 2
    finally:
        thread.join()
    report = json.loads(tmp_path.joinpath("run", "report.json").read_text())
    (retry,) = report["retries"]
    assert ("was killed by SIGKILL" if what == "rank" else CRASHED) in retry["reason"]
    assert len(retry["reason"]) < 400
    assert (retry["number"], retry["start"]) == (1, 1)


def test_a_rank_raises(cluster: Any, tmp_path: Path) -> None:
    def fails() -> None:
        world = tr.world()
        world.barrier()
        time.sleep(1.2)  # every supervisor has said once how its rank stands
        if world.rank == 1:
            raise KeyError("mine")
        while world.gather(True):
            pass

    with pytest.raises(RankFailed) as caught:
        launch(cluster, fails, tmp_path / "run")
    assert (caught.value.rank, repr(caught.value.__cause__)) == (1, "KeyError('mine')")
    assert "tritium-failure" not in str(caught.value)
    assert "Meanwhile the others:\n  rank 0: " in str(caught.value)


def test_a_rank_stands_still(cluster: Any, tmp_path: Path) -> None:
    def freezes() -> None:
        world = tr.world()
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()

    with pytest.raises(Stalled, match=r"^Rank 1 on \S+ hangs: .*its process is stopped") as caught:
        launch(cluster, freezes, tmp_path / "run", stall_timeout=2.0)
    assert sorted(caught.value.stacks) == [0, 1]
    assert "in freezes" in caught.value.stacks[0]
    assert "in freezes" in tmp_path.joinpath("run", "stacks", "rank-0.txt").read_text()


def test_a_training_that_takes_long_is_no_stall_of_its_source(cluster: Any, tmp_path: Path) -> None:
    """The server lists the stages of the source, whose output is there, as ones of which no task has ended."""

    def train() -> str:
        began = datetime.now(timezone.utc).isoformat(timespec="milliseconds")  # as in events
        for step in range(50):
            tr.world().log(step=step)
            time.sleep(0.1)
        return began

    frame, limits = cluster.spark.range(0, 1000, 1, 5), {"stall_timeout": 1.0, "on_stall": "report"}
    began = max(launch(cluster, train, tmp_path, data={"train": frame}, retries=0, **limits))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert not [event for event in events if event["kind"] == "stalled" and "stage" in event and event["time"] > began]
