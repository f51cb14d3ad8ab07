"""The text of an error: the failure, what the other ranks did, the retries, the places to look, the next move."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import tritium as tr
from clusters import wait
from tritium.errors import JobFailed, RankFailed
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.coordinator.members import numbers
from tritium.gang.driver import attempt

QUIET: dict[str, Any] = {"progress": False, "output": "none"}


def train(die: Callable[[], Any], go: str) -> int:
    """Take two steps with a checkpoint each; then rank 1 dies while the others wait in their barrier."""
    world = tr.world()
    saved = world.checkpoint.load()
    for step in range(2 if saved is None else 0):
        world.log(step=step)
        world.checkpoint.save({"weights": np.zeros(3)}, step + 1)
    world.checkpoint.wait()
    if world.rank == 1:
        wait(Path(go).exists, "the others are in their barrier", 60)
        die()
    world.barrier()
    return -1 if saved is None else saved.step


def fail(die: Callable[[], Any], tmp_path: Path, **settings: Any) -> RankFailed:
    with pytest.raises(RankFailed) as caught:
        tr.launch(
            train, args=(die, str(tmp_path / "go")), on="driver", run_dir=str(tmp_path / "run"), **QUIET | settings
        )
    return caught.value


def test_of_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def when_the_others_wait() -> None:
        wait(lambda: bool(made), "a coordinator")
        wait(lambda: doing(made[0]).count("step 2, in barrier") == 2, "both are in their barrier", 60)
        tmp_path.joinpath("go").touch()

    made: list[Coordinator] = []

    class Kept(Coordinator):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            made.append(self)

    monkeypatch.setattr(attempt, "Coordinator", Kept)
    looks = threading.Thread(target=when_the_others_wait)
    looks.start()
    try:
        error = fail(lambda: {}["price"], tmp_path, ranks=3)
    finally:
        looks.join()
    run = tmp_path / "run"
    head, trace, others, end = str(error).split("\n\n")
    assert head == f"Rank 1 on {error.host} (pid {error.pid}) raised KeyError: 'price'."
    assert trace.startswith("Its traceback (rank 1):\nTraceback (most recent call last):")
    assert trace.endswith("KeyError: 'price'")
    assert others == "Meanwhile the others:\n  ranks 0, 2: step 2, in barrier"
    assert end.splitlines() == [
        f"Logs and events of the whole run: {run}",
        f"Newest checkpoint: step 2, in {run}/checkpoints/000000000002",
        f'Next: the same call with run_dir="{run}" continues from there.',
    ]
    assert tr.launch(train, args=(print, str(tmp_path / "go")), ranks=3, on="driver", run_dir=str(run), **QUIET) == [
        2,
        2,
        2,
    ]


def doing(coordinator: Coordinator) -> list[str]:
    return [member.status.place() for member in list(coordinator.members.values()) if member.status is not None]


def test_of_attempts_from_a_checkpoint_of_an_earlier_launch(tmp_path: Path) -> None:
    tmp_path.joinpath("go").touch()
    fail(lambda: {}["price"], tmp_path, ranks=2)
    error = fail(lambda: os.kill(os.getpid(), signal.SIGSEGV), tmp_path, ranks=2, retries=1)
    *_, tried, end = str(error).split("\n\n")
    first, second, over = tried.splitlines()
    assert first.startswith("Attempt 1: rank 1 on ")
    assert second.startswith("Attempt 2: rank 1 on ")
    assert over == "Given up after 2 attempts (retries=1)."
    assert f"Newest checkpoint: step 2, in {tmp_path}/run/checkpoints/000000000002" in end


@pytest.mark.parametrize("cluster", ["local-cluster"], indirect=True)
def test_of_a_lost_executor_is_without_javas_stack_and_a_new_launch_waits_for_its_successor(
    cluster: Any, tmp_path: Path
) -> None:
    def stay() -> None:
        (tmp_path / f"rank-{tr.world().rank}").touch()
        while tr.world().gather(True):
            pass

    def kill() -> None:
        wait(lambda: len(list(tmp_path.glob("rank-*"))) == 2, "both ranks run", 60)
        executors()[0].kill()

    launch: Callable[..., list[Any]] = lambda function, **more: tr.launch(  # noqa: E731
        function, ranks=2, spark=cluster.spark, **QUIET | more
    )
    assert launch(lambda: 1) == [1, 1]
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises((RankFailed, JobFailed), match="ExecutorLostFailure") as caught:
            launch(stay, run_dir=str(tmp_path / "run"), retries=0)
    finally:
        killer.join()
    told = "".join(traceback.format_exception(caught.value))
    assert "\tat " not in told
    assert "Py4J" not in told
    assert len(str(caught.value)) < 1000
    assert "\tat org.apache.spark" in (tmp_path / "run" / "spark-error.txt").read_text()
    assert "\tat org.apache.spark" in str(caught.value.spark_error)
    assert launch(lambda: 2) == [2, 2]


def executors() -> list[psutil.Process]:
    """Return the JVMs of this session's executors."""
    children = psutil.Process().children(recursive=True)
    living = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if any("CoarseGrainedExecutorBackend" in word for word in child.cmdline())]


def test_ranks_in_words() -> None:
    words = [numbers(ranks) for ranks in ([4], [2, 0], [0, 1], [5, 0, 2, 3, 4])]
    assert words == ["rank 4", "ranks 0, 2", "ranks 0, 1", "ranks 0, 2-5"]
