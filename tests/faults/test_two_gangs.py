"""Two gangs on one cluster never deadlock, whatever each asks for and whichever comes first."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import clusters
import tritium as tr

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("cluster", ["local-cluster"], indirect=True)]


def at_once(*launches: Callable[[], Any]) -> list[Any]:
    """Return what each of them returned or raised; all begin at the same moment."""
    outcomes: list[Any] = [None] * len(launches)
    together = threading.Barrier(len(launches))

    def run(number: int) -> None:
        together.wait()
        try:
            outcomes[number] = launches[number]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(launches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a launch hangs"
    return outcomes


def gang(spark: Any, fn: Callable[[], Any], ranks: int, **settings: Any) -> Callable[[], Any]:
    quiet = {"progress": False, "output": "none", "start_timeout": 100}
    return lambda: tr.launch(fn, ranks=ranks, spark=spark, **{**quiet, **settings})


def test_each_needs_half_of_the_slots_and_both_run_side_by_side(cluster: Any, tmp_path: Path) -> None:
    def meet(mine: str, other: str) -> Callable[[], str]:
        def train() -> str:
            Path(tmp_path, mine).touch()
            clusters.wait(Path(tmp_path, other).exists, "the other gang runs at the same time", 90)
            return mine

        return train

    spark = cluster.spark
    assert at_once(gang(spark, meet("a", "b"), 1), gang(spark, meet("b", "a"), 1)) == [["a"], ["b"]]


def test_each_needs_all_slots_and_they_run_one_after_the_other(cluster: Any, tmp_path: Path) -> None:
    """With rows, whose map stages run while the other gang holds every slot, or before it comes."""

    def train() -> tuple[float, float, float]:
        world, began = tr.world(), time.time()
        world.barrier()
        (epoch,) = world.shard("train").epochs(1, batch_size=100)
        total = sum(float(batch["x"][: batch.rows].sum()) for batch in epoch)
        time.sleep(0.3)
        return sum(world.gather(total)), began, time.time()

    spark = cluster.spark
    frame = spark.range(0, 1000, 1, 4).selectExpr("cast(id as double) as x")
    outcomes = at_once(*[gang(spark, train, 2, data={"train": frame})] * 3)
    assert [[total for total, _, _ in ranks] for ranks in outcomes] == [[499_500.0] * 2] * 3, outcomes
    spans = sorted((min(b for _, b, _ in ranks), max(e for _, _, e in ranks)) for ranks in outcomes)
    assert all(before[1] <= after[0] + 0.1 for before, after in itertools.pairwise(spans)), spans


def test_a_gang_that_is_killed_while_another_waits_is_started_again_before_it(cluster: Any, tmp_path: Path) -> None:
    waiting = tmp_path / "waiting/events.jsonl"

    def killed() -> float:
        world = tr.world()
        if not tmp_path.joinpath("killed").exists():
            tmp_path.joinpath("runs").touch()
            clusters.wait(
                lambda: waiting.exists() and "waiting for slots" in waiting.read_text(), "the other waits", 90
            )
            world.barrier()
            if world.rank == 1:
                tmp_path.joinpath("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
        time.sleep(0.3)
        return time.time()

    def waits() -> list[Any]:
        clusters.wait(tmp_path.joinpath("runs").exists, "the first gang runs", 90)
        return gang(cluster.spark, time.time, 2, run_dir=str(waiting.parent))()

    first, second = at_once(gang(cluster.spark, killed, 2), waits)
    assert max(first) < min(second)
