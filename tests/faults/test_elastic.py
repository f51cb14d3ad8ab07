"""A cluster that loses a machine, and gets it back: the gang continues with what is left, and grows again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import clusters
from bounds import timed
from clusters import Workers
from tritium.gang.driver import cluster as cluster_module
from tritium.ml import TorchEstimator
from tritium.ml.callbacks import Callback, TrainState

pytestmark = [pytest.mark.timeout(400), pytest.mark.parametrize("cluster", ["breakable"], indirect=True)]


def executors(spark: Any) -> int:
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1


@pytest.fixture
def two_workers(cluster: Any) -> Iterator[Any]:
    yield cluster.spark
    if executors(cluster.spark) < 2:
        Workers.here.start()
        clusters.wait(lambda: executors(cluster.spark) == 2, "both executors are there again")


class StepByStep(Callback):
    """A callback that marks each epoch's end and the gang's size, and waits until it may continue."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, state: TrainState) -> None:
        (self.folder / f"epoch-{state.epoch - 1}-of-{state.size}").touch()
        deadline = time.monotonic() + 200
        while not (self.folder / f"go-{state.epoch - 1}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


class Training(threading.Thread):
    """A fit that continues while the test breaks its cluster."""

    def __init__(self, frame: Any, **settings: Any) -> None:
        super().__init__(name="fit", daemon=True)
        self.model: Any = None
        self.error: BaseException | None = None
        self._frame = frame
        self._estimator = TorchEstimator(
            model=lambda: nn.Linear(1, 1),
            loss=nn.MSELoss(),
            optimizer=lambda p: torch.optim.SGD(p, 0.05),
            feature_cols=["a"],
            label_cols=["y"],
            batch_size=8,
            progress=False,
            output="none",
            verbose=False,
            **settings,
        )

    def run(self) -> None:
        try:
            self.model = self._estimator.fit(self._frame)
        except BaseException as error:  # noqa: BLE001 - a thread has no one above it; the test looks at it
            self.error = error


def rows(spark: Any) -> Any:
    return spark.range(0, 160, 1, 4).selectExpr("sin(id) as a", "2 * sin(id) - 1 as y")


def notes(folder: Path) -> list[str]:
    return list(json.loads((folder / "report.json").read_text())["notes"])


def test_a_gang_goes_on_with_what_is_left_and_grows_when_slots_come_back(
    two_workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "RETURN_SECONDS", 2.0)  # the worker does not come back before it is started
    run = tmp_path / "run"
    fit = Training(
        rows(two_workers),
        ranks=(1, 2),
        epochs=4,
        checkpoint_every=4,
        callbacks=[StepByStep(tmp_path)],
        run_dir=str(run),
    )
    fit.start()

    def reached(what: str) -> None:
        there = tmp_path / what
        clusters.wait(lambda: there.exists() or not fit.is_alive(), f"{what} is reached", 60)
        assert fit.error is None
        assert (tmp_path / what).exists(), notes(run)

    reached("epoch-0-of-2")
    (tmp_path / "go-0").touch()
    reached("epoch-1-of-2")  # the checkpoints of epoch 0 are complete: another was begun
    with timed("executor killed"):
        Workers.here.kill()
        clusters.wait(lambda: any("Retry 1 of 2" in note for note in events(run)), "the loss is noticed", 60)
    reached("epoch-1-of-1")
    Workers.here.start()
    clusters.wait(lambda: any("there are slots for 2 ranks again" in note for note in events(run)), "more is offered")
    (tmp_path / "go-1").touch()
    reached("epoch-2-of-2")
    (tmp_path / "go-2").touch()
    (tmp_path / "go-3").touch()
    fit.join(120)
    assert fit.error is None
    assert [entry["rows"] for entry in fit.model.history] == [160] * 4
    said = "\n".join(notes(run))
    assert "Retry 1 of 2, from the checkpoint of step" in said
    assert "starting again with 1 rank\n" in said
    assert "starting again with 2 ranks\ncontinues from the checkpoint of step " in said
    assert two_workers.range(10).count() == 10


def test_an_executor_that_is_killed_costs_a_retry_and_nothing_else(two_workers: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit = Training(
        rows(two_workers), ranks=2, epochs=3, checkpoint_every=4, callbacks=[StepByStep(tmp_path)], run_dir=str(run)
    )
    fit.start()
    for epoch in range(3):
        (tmp_path / f"go-{epoch}").touch() if epoch != 1 else None
    clusters.wait((tmp_path / "epoch-1-of-2").exists, "epoch 1 has ended once")
    worker = psutil.Process(Workers.here.processes[-1].pid)
    with timed("executor killed"):
        for executor in worker.children():
            executor.kill()
        clusters.wait(lambda: any("Retry 1 of 2" in note for note in events(run)), "the loss is noticed", 60)
    (tmp_path / "go-1").touch()
    fit.join(200)
    assert fit.error is None
    assert [entry["rows"] for entry in fit.model.history] == [160] * 3
    assert two_workers.range(10).count() == 10


def events(run: Path) -> list[str]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "note"]
