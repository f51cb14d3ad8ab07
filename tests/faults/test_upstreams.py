"""An executor is killed in mid-training, with a scan, a join, a groupBy or a repartition before the exchange."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import tritium as tr

pytestmark = pytest.mark.parametrize("cluster", ["local-cluster"], indirect=True)

ROWS, EPOCHS, BATCH = 2000, 3, 50
WEIGHTS = [2.0, -1.0, 0.5]


def plain(spark: Any) -> Any:
    """Return k and three features that are nearly independent; y is a linear function of them."""
    features = [f"double(({number} * k) % 1009) / 291 - 1.73 as x{i}" for i, number in enumerate((7919, 10007, 5003))]
    frame = spark.range(0, ROWS, 1, 4).selectExpr("id as k").selectExpr("k", *features)
    return frame.selectExpr("*", "2.0 * x0 - x1 + 0.5 * x2 as y")


def scan(spark: Any, folder: Path) -> Any:
    if not folder.joinpath("rows").exists():
        plain(spark).write.parquet(str(folder / "rows"))
    return spark.read.parquet(str(folder / "rows"))


def joined(spark: Any, folder: Path) -> Any:
    right = spark.range(0, ROWS, 1, 3).selectExpr("id as k", "id * 3 as v")
    return plain(spark).join(right.hint("shuffle_hash"), "k")


def grouped(spark: Any, folder: Path) -> Any:
    from pyspark.sql import functions as F

    twice = plain(spark).union(plain(spark))
    return twice.groupBy("k").agg(*(F.first(name).alias(name) for name in ("x0", "x1", "x2", "y")))


def repartitioned(spark: Any, folder: Path) -> Any:
    return plain(spark).repartition(6)


SOURCES: dict[str, Callable[[Any, Path], Any]] = {
    "scan": scan,
    "join": joined,
    "groupBy": grouped,
    "repartition": repartitioned,
}


def train(folder: str) -> tuple[list[float], dict[int, list[int]]]:
    """Return, in a rank, the weights, and by epoch the rows that count for them; a restarted epoch is counted again."""
    world = tr.world()
    weights, taken, step = np.zeros(3), dict[int, list[int]](), 0
    saved = world.checkpoint.load()
    if saved is not None:
        weights, taken, step = saved["weights"], saved.own[world.rank]["taken"], saved.step
    resume = None if saved is None else [own["position"] for own in saved.own]
    shard = world.shard("train")
    for epoch in shard.epochs(EPOCHS, batch_size=BATCH, seed=7, resume=resume):
        if epoch.first == 0:
            taken[epoch.number] = []
        for batch in epoch:
            if world.rank == 1 and (epoch.number, batch.step) == (1, 11):
                world.checkpoint.wait()
                lose_executor_once(folder)
            x, y = (np.array(batch[name][: batch.rows], np.float64) for name in ("x", "y"))
            gradient = world.gather(x.T @ (x @ weights - y[:, 0]))
            weights = weights - 0.2 * np.sum(gradient, axis=0) / batch.total
            taken[epoch.number].extend(batch["k"][: batch.rows].tolist())
            step += 1
            world.checkpoint.save(
                lambda weights=weights: {"weights": weights},
                step,
                own=lambda: {"position": shard.state(), "taken": taken},
                every=5,
            )
    return weights.tolist(), taken


def lose_executor_once(folder: str) -> None:
    """SIGKILL the JVM that this rank's supervisor belongs to, and wait to be ended by that."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(f"{folder}/killed", os.O_CREAT | os.O_EXCL))
        own = [p for p in psutil.Process().parents() if "CoarseGrainedExecutorBackend" in " ".join(p.cmdline())]
        own[0].kill()
        signal.pause()


def run(spark: Any, frame: Any, folder: Path, **more: Any) -> list[Any]:
    data = frame
    if not isinstance(frame, tr.Exchange):
        columns = {"x": ["x0", "x1", "x2"], "y": ["y"], "k": "k"}
        data = {"train": tr.Data(frame, columns=columns, **more.pop("data", {}))}
    where = {"run_dir": str(folder / "run"), "spark": spark, "progress": False}
    return tr.launch(train, ranks=2, args=(str(folder),), data=data, **where, **more)


def notes(folder: Path) -> list[str]:
    report = json.loads((folder / "run" / "report.json").read_text())
    (retry,) = report["retries"]
    assert "was lost" in retry["reason"] or "was killed" in retry["reason"], retry
    assert retry["start"] in (25, 30), (
        "20 steps an epoch, and a save every fifth, the last of them perhaps not yet told"
    )
    return list(report["notes"])


def right(spark: Any, results: list[Any]) -> None:
    """Assert every row once per epoch, the weights, and a session that answers."""
    for number in range(EPOCHS):
        assert Counter(k for _, taken in results for k in taken[number]) == Counter(range(ROWS)), f"epoch {number}"
    assert results[0][0] == results[1][0]
    assert np.allclose(results[0][0], WEIGHTS, atol=1e-3), results[0][0]
    assert spark.range(100).count() == 100


ALL = int(os.environ.get("TRITIUM_FAULT_ROUNDS", "1")) > 1  # `make test` takes what shows most
KEYED = [("join", True), ("groupBy", True)]
PLAIN = [("scan", False), ("repartition", False)] + [("join", False), ("groupBy", False)] * ALL


@pytest.mark.parametrize(("source", "keyed"), PLAIN + KEYED)
def test_the_training_ends_with_every_row_once_an_epoch(cluster: Any, source: str, keyed: bool, tmp_path: Path) -> None:
    """With a row key bit for bit as if nothing had happened; else the epoch may start over, aloud."""
    spark, frame = cluster.spark, SOURCES[source](cluster.spark, tmp_path)
    more = {"data": {"row_key": "k"}} if keyed else {}
    found = run(spark, frame, tmp_path, **more)
    right(spark, found)
    restarted = [note for note in notes(tmp_path) if "so epoch 2 starts over" in note]
    print(f"{source}: {restarted or 'continues'}")
    if keyed:
        whole = tmp_path / "whole"
        whole.mkdir()
        whole.joinpath("killed").touch()
        assert found == run(spark, frame, whole, **more)
    assert not restarted or not (keyed or source == "scan")


def turned(spark: Any, folder: Path) -> Any:
    """Yield rows that have other ids once an executor is lost."""

    def turn(batches: Iterator[Any]) -> Iterator[Any]:
        lost = folder.joinpath("killed").exists()
        for batch in batches:
            yield batch.take(list(reversed(range(batch.num_rows)))) if lost else batch

    return plain(spark).mapInArrow(turn, "k long, x0 double, x1 double, x2 double, y double")


@pytest.mark.parametrize("kept", ["by the user", *["by the launch"] * ALL])
def test_rows_that_were_kept_are_never_of_two_evaluations(cluster: Any, kept: str, tmp_path: Path) -> None:
    """What the lost executor held of them would be computed again alone: some rows twice, and some not at all."""
    spark, frame = cluster.spark, turned(cluster.spark, tmp_path)
    if kept == "by the launch":
        results, attempts = run(spark, frame, tmp_path, persist=True), 2
    else:
        columns = {"x": ["x0", "x1", "x2"], "y": ["y"], "k": "k"}
        with tr.Exchange({"train": tr.Data(frame, columns=columns)}, 2).persist() as exchange:
            results, attempts = run(spark, exchange, tmp_path), 3
    right(spark, results)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    reasons = [retry["reason"] for retry in report["retries"]]
    assert len(reasons) == attempts - 1, reasons
    assert attempts == 2 or reasons[1].startswith("A part of the rows that were kept was lost"), reasons
    assert any("so epoch 2 starts over" in note for note in report["notes"])
