"""A retry of a run that keeps its rows reads them, and does not recompute the source."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import tritium as tr
from tritium.errors import RankFailed
from tritium.ml import TorchEstimator

ROWS = 600


def counted(spark: Any, folder: Path) -> Any:
    """Return a source that leaves a file each time one of its partitions is computed."""

    def count(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        Path(folder, f"computed-{context.partitionId()}-{context.taskAttemptId()}").touch()
        yield from batches

    return spark.range(0, ROWS, 1, 3).selectExpr("id as k", "double(id % 7) as x").mapInArrow(count, "k long, x double")


def computed(folder: Path) -> int:
    return len(list(folder.glob("computed-*")))


def die_once(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(f"{folder}/killed", os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str) -> list[int]:
    world, taken = tr.world(), list[int]()
    for epoch in world.shard("train").epochs(1, batch_size=50):
        for batch in epoch:
            taken += batch["k"][: batch.rows].tolist()
            if batch.step == 2 and world.rank == 1:
                die_once(folder)
    return taken


def retries(run_dir: Path) -> int:
    return len(json.loads((run_dir / "report.json").read_text())["retries"])


def is_kept(spark: Any) -> bool:
    return bool(spark.sparkContext._jsc.sc().getPersistentRDDs().size())


@pytest.mark.parametrize("persist", [True, False])
def test_a_launch(spark: Any, tmp_path: Path, persist: bool) -> None:
    frame = counted(spark, tmp_path)
    more = {"persist": persist, "progress": False, "run_dir": str(tmp_path / "run")}
    results = tr.launch(train, ranks=2, args=(str(tmp_path),), data={"train": frame}, spark=spark, **more)
    assert sorted(results[0] + results[1]) == list(range(ROWS))
    assert retries(tmp_path / "run") == 1
    assert computed(tmp_path) == (3 if persist else 6)
    assert not is_kept(spark)


def test_an_exchange_of_the_users_own_stays_theirs(spark: Any, tmp_path: Path) -> None:
    with tr.Exchange({"train": counted(spark, tmp_path)}, 2).persist() as exchange:
        more = {"progress": False, "run_dir": str(tmp_path / "run")}
        results = tr.launch(train, ranks=2, args=(str(tmp_path),), data=exchange, spark=spark, **more)
        assert is_kept(spark)
    assert sorted(results[0] + results[1]) == list(range(ROWS))
    assert retries(tmp_path / "run") == 1
    assert computed(tmp_path) == 3


def test_what_nobody_has_read_to_its_end_is_computed_again(spark: Any, tmp_path: Path) -> None:
    """It may be of two evaluations of the source: an executor could have been lost in between."""
    tmp_path.joinpath("killed").touch()
    with tr.Exchange({"train": counted(spark, tmp_path)}, 2).persist() as exchange:
        with exchange.read():
            assert exchange.frame.count() == ROWS + 2
        for _ in range(2):
            results = tr.launch(train, ranks=2, args=(str(tmp_path),), data=exchange, spark=spark, progress=False)
            assert sorted(results[0] + results[1]) == list(range(ROWS))
    assert computed(tmp_path) == 6


def test_what_was_kept_is_given_back_after_an_error(spark: Any, tmp_path: Path) -> None:
    def fail() -> None:
        tr.world().shard("train")
        raise ZeroDivisionError

    with pytest.raises(RankFailed):
        tr.launch(fail, data={"train": counted(spark, tmp_path)}, spark=spark, persist=True, progress=False)
    assert not is_kept(spark)


def test_an_estimator(spark: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def step(module: Any, batch: Any) -> torch.Tensor:
        if (batch.epoch, batch.step) == (1, 1) and tr.world().rank == 1:
            die_once(folder)
        return torch.nn.functional.mse_loss(module(batch["features"]), batch["label"])

    estimator = TorchEstimator(
        model=torch.nn.Linear(1, 1),
        optimizer=lambda p: torch.optim.SGD(p, 0.01),
        feature_cols=["x"],
        label_cols=["x"],
        train_step=step,
        batch_size=50,
        epochs=2,
        ranks=2,
        run_dir=str(tmp_path / "run"),
        checkpoint_every=2,
        persist=True,
        progress=False,
        verbose=False,
    )
    model = estimator.fit(counted(spark, tmp_path))
    assert [entry["rows"] for entry in model.history] == [ROWS] * 2
    assert retries(tmp_path / "run") == 1
    assert computed(tmp_path) == 3
    notes = json.loads((tmp_path / "run" / "report.json").read_text())["notes"]
    assert not any("starts over" in note for note in notes), notes
    assert not is_kept(spark)
