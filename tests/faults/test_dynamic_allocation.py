"""Gangs on a cluster whose executors come and go, where Spark has no barrier stages: all ranks begin, or none does."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import clusters
import tritium as tr
from ranks import rank_1_is_killed_once
from tritium.errors import RankFailed
from tritium.gang.driver import on_cluster as cluster_run

pytestmark = [pytest.mark.timeout(400), pytest.mark.parametrize("cluster", ["dynamic"], indirect=True)]
QUIET: dict[str, Any] = {"ranks": 2, "progress": False, "output": "none"}


def notes(run: Path) -> list[str]:
    file = run / "events.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [event["text"] for event in map(json.loads, whole.splitlines()) if event["kind"] == "note"]


def test_ranks_begin_together_and_every_row_comes_once(cluster: Any, tmp_path: Path) -> None:
    def train() -> float:
        world = tr.world()
        world.barrier()
        (epoch,) = world.shard("train").epochs(1, batch_size=64)
        return sum(world.gather(sum(float(batch["id"][: batch.rows].sum()) for batch in epoch)))

    frame = cluster.spark.range(0, 1000, 1, 4)
    total = float(sum(range(1000)))
    assert tr.launch(train, data={"train": frame}, run_dir=str(tmp_path / "run"), **QUIET) == [total, total]
    assert notes(tmp_path / "run")[0].startswith("dynamic allocation: ")


def test_a_rank_that_fails_ends_the_gang_and_is_not_started_by_spark_again(cluster: Any, tmp_path: Path) -> None:
    def train() -> None:
        world = tr.world()
        Path(tmp_path, f"{world.rank}-{os.getpid()}").touch()
        world.barrier()
        if world.rank == 1:
            raise ValueError("mine")
        world.barrier()

    with pytest.raises(RankFailed, match="mine"):
        tr.launch(train, spark=cluster.spark, **QUIET)
    assert len(list(tmp_path.iterdir())) == 2
    assert cluster.spark.range(10).count() == 10


def test_a_rank_that_is_killed_costs_a_retry(cluster: Any, tmp_path: Path) -> None:
    assert tr.launch(rank_1_is_killed_once(tmp_path), spark=cluster.spark, **QUIET) == [2, 2]


def test_two_gangs_that_each_hold_half_of_the_slots_give_them_back_and_both_run(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_run, "HOLD_SECONDS", 5.0)
    context = cluster.spark.sparkContext
    tr.launch(lambda: None, spark=cluster.spark, **QUIET)  # both executors are there now
    results: dict[str, Any] = {}

    def gang(name: str, run: Callable[[], Any]) -> threading.Thread:
        def body() -> None:
            context.setLocalProperty("spark.scheduler.pool", name)
            try:
                results[name] = run()
            finally:
                context.setLocalProperty("spark.scheduler.pool", None)

        thread = threading.Thread(target=body, name=f"gang-{name}", daemon=True)
        thread.start()
        return thread

    def launch(name: str) -> Callable[[], Any]:
        return lambda: tr.launch(
            lambda: sum(tr.world().gather(1)),
            spark=cluster.spark,
            run_dir=str(tmp_path / name),
            **(QUIET | {"start_timeout": 200.0}),
        )

    def blocked(batches: Any) -> Any:
        import time

        while not tmp_path.joinpath("go").exists():
            time.sleep(0.05)
        yield from batches

    def block() -> int:
        frame: Any = cluster.spark.range(0, 2, 1, 2)
        return int(frame.mapInArrow(blocked, "id long").count())

    blocker = gang("blocker", block)  # while it holds both slots, both gangs ask for them, and then get one each
    tracker = context.statusTracker()
    clusters.wait(lambda: bool(tracker.getActiveStageIds()), "the blocker runs")
    gangs = [gang(name, launch(name)) for name in ("a", "b")]
    clusters.wait(lambda: len(tracker.getActiveStageIds()) >= 3, "both gangs wait for slots")
    tmp_path.joinpath("go").touch()
    for thread in (blocker, *gangs):
        thread.join(200)
    assert results == {"blocker": 2, "a": [2, 2], "b": [2, 2]}
    said = [note for name in ("a", "b") for note in notes(tmp_path / name)]
    assert any("1 of 2 slots came, and no more for 5 s: they are given back" in note for note in said), said
