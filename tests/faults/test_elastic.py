"""A cluster that loses a machine, and gets it back: the gang continues with what is left, and grows again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import clusters
import tritium as tr
from bounds import timed
from clusters import Workers
from tritium.ml import TorchEstimator
from tritium.ml.callbacks import Callback, TrainState
from tritium.spark.cluster.base import Cluster

QUIET = {"progress": False, "output": "none"}

pytestmark = [pytest.mark.timeout(400), pytest.mark.parametrize("cluster", ["breakable"], indirect=True)]


def executors(spark: Any) -> int:
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1


@pytest.fixture
def two_workers(cluster: Any) -> Iterator[Any]:
    yield cluster.spark
    if executors(cluster.spark) < 2:
        Workers.here.start()
        clusters.wait(lambda: executors(cluster.spark) == 2, "both executors are there again")


def stop(folder: Path, epoch: int, size: int) -> None:
    """Mark an epoch's end and the gang's size, and wait until the test lets it continue; mark that it can grow."""
    (folder / f"epoch-{epoch}-of-{size}").touch()
    deadline = time.monotonic() + 200
    while not (folder / f"go-{epoch}").exists() and time.monotonic() < deadline:
        if tr.world()._control.could_be_more:
            (folder / "can-grow").touch()
        time.sleep(0.05)


class StepByStep(Callback):
    """A callback that stops at each epoch's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, state: TrainState) -> None:
        stop(self.folder, state.epoch - 1, state.size)


class Running(threading.Thread):
    """A training that continues while the test breaks its cluster."""

    def __init__(self, train: Callable[[], Any]) -> None:
        super().__init__(name="training", daemon=True)
        self.result: Any = None
        self.error: BaseException | None = None
        self._train = train

    def run(self) -> None:
        try:
            self.result = self._train()
        except BaseException as error:  # noqa: BLE001 - a thread has no one above it; the test looks at it
            self.error = error


def fit(frame: Any, **settings: Any) -> Running:
    """Begin to fit an estimator."""
    estimator = TorchEstimator(
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
    training = Running(lambda: estimator.fit(frame))
    training.start()
    return training


def elastic(folder: str) -> tuple[list[int], float]:
    """Train as users of Horovod's elastic do, epoch by epoch as the test says; returns how many ranks each had."""
    import tritium.compat.horovod.torch as hvd

    hvd.init()
    model = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < 4:
            optimizer.zero_grad()
            (model(torch.ones(8, 1)) - 1).square().mean().backward()
            optimizer.step()
            stop(Path(folder), state.epoch, hvd.size())
            state.sizes.append(hvd.size())
            state.epoch += 1
            state.commit()
            tr.world().checkpoint.wait()  # so that the test knows what was written

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sizes=[])
    train(state)
    return state.sizes, float(model.weight)


def rows(spark: Any) -> Any:
    return spark.range(0, 160, 1, 4).selectExpr("sin(id) as a", "2 * sin(id) - 1 as y")


def notes(folder: Path) -> list[str]:
    return list(json.loads((folder / "report.json").read_text())["notes"])


def lose_a_worker_and_get_it_back(training: Running, folder: Path, run: Callable[[], Path], retries: int) -> None:
    """Kill a worker in epoch 1 of 4, and start it again once the gang goes on without."""
    retry = f"Retry 1 of {retries}"

    def reached(what: str) -> None:
        there = folder / what
        with contextlib.suppress(TimeoutError):  # the assertion below tells more
            clusters.wait(lambda: there.exists() or not training.is_alive(), f"{what} is reached", 60)
        assert training.error is None
        assert there.exists(), (what, sorted(path.name for path in folder.iterdir()), events(run()))

    reached("epoch-0-of-2")
    (folder / "go-0").touch()
    reached("epoch-1-of-2")  # the checkpoints of epoch 0 are complete: another was begun
    with timed("executor killed"):
        Workers.here.kill()
        clusters.wait(lambda: any(retry in note for note in events(run())), "the loss is noticed", 60)
    reached("epoch-1-of-1")
    Workers.here.start()
    clusters.wait(lambda: any("there are slots for 2 ranks again" in note for note in events(run())), "more is offered")
    reached("can-grow")  # the rank has heard of it
    (folder / "go-1").touch()
    reached("epoch-2-of-2")
    (folder / "go-2").touch()
    (folder / "go-3").touch()
    training.join(120)
    assert training.error is None
    said = "\n".join(notes(run()))
    assert f"{retry}, from the checkpoint of step" in said
    assert "starting again with 1 rank\n" in said
    assert "starting again with 2 ranks\ncontinues from the checkpoint of step " in said


def test_a_gang_goes_on_with_what_is_left_and_grows_when_slots_come_back(
    two_workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cluster, "replacement_seconds", 2.0)  # the worker does not come back before it is started
    run = tmp_path / "run"
    training = fit(
        rows(two_workers),
        ranks=(1, 2),
        epochs=4,
        checkpoint_every=4,
        callbacks=[StepByStep(tmp_path)],
        run_dir=str(run),
    )
    lose_a_worker_and_get_it_back(training, tmp_path, lambda: run, retries=2)
    assert [entry["rows"] for entry in training.result.history] == [160] * 4
    assert two_workers.range(10).count() == 10


def test_horovods_elastic_training_goes_on_with_what_is_left_and_grows(
    two_workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tritium.compat  # noqa: F401 - `make faults` repeats the test, and a fixture undoes the import after each
    from tritium.compat.horovod.spark import run_elastic

    monkeypatch.setattr(Cluster, "replacement_seconds", 2.0)
    monkeypatch.setenv("TRITIUM_RUNS", str(tmp_path / "runs"))
    settings: dict[str, Any] = {"min_num_proc": 1, "max_num_proc": 2, "env": {"TRITIUM_COMMIT_SECONDS": "0"}}
    training = Running(lambda: run_elastic(elastic, args=(str(tmp_path),), verbose=0, **settings))
    training.start()
    lose_a_worker_and_get_it_back(training, tmp_path, lambda: next((tmp_path / "runs").iterdir()), retries=3)
    first, second = training.result
    assert first == second
    assert first[0] == [2, 1, 2, 2]


def test_an_executor_that_is_killed_costs_a_retry_and_nothing_else(two_workers: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = fit(
        rows(two_workers), ranks=2, epochs=3, checkpoint_every=4, callbacks=[StepByStep(tmp_path)], run_dir=str(run)
    )
    for epoch in range(3):
        (tmp_path / f"go-{epoch}").touch() if epoch != 1 else None
    clusters.wait((tmp_path / "epoch-1-of-2").exists, "epoch 1 has ended once")
    worker = psutil.Process(Workers.here.processes[-1].pid)
    with timed("executor killed"):
        for executor in worker.children():
            executor.kill()
        clusters.wait(lambda: any("Retry 1 of 2" in note for note in events(run)), "the loss is noticed", 60)
    (tmp_path / "go-1").touch()
    training.join(200)
    assert training.error is None
    assert [entry["rows"] for entry in training.result.history] == [160] * 3
    assert two_workers.range(10).count() == 10


def test_a_host_that_is_taken_away_with_notice_costs_no_step(two_workers: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = fit(
        rows(two_workers),
        ranks=2,
        epochs=40,
        checkpoint_every="1h",
        callbacks=[Slow(tmp_path)],
        run_dir=str(run),
        retries=0,
    )
    clusters.wait((tmp_path / "step-20").exists, "step 20 was taken")
    with taken_away(two_workers):
        training.join(200)
    assert training.error is None
    assert [entry["rows"] for entry in training.result.history] == [160] * 40
    taken = [int(line) for line in (tmp_path / "steps").read_text().split()]
    assert taken == list(range(1, 401))  # no step twice, and none left out


@pytest.mark.parametrize("seed", range(int(os.environ.get("TRITIUM_FAULT_ROUNDS", "2"))))
def test_a_function_that_saves_goes_on_with_what_there_is(seed: int, two_workers: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    size, moment = (2, (1, 2))[seed % 2], random.Random(seed).randint(1, 195)
    training = Running(lambda: tr.launch(counting, ranks=size, args=(str(tmp_path),), run_dir=str(run), **QUIET))
    training.start()
    clusters.wait((tmp_path / f"step-{moment}").exists, f"step {moment} was taken")
    with taken_away(two_workers, replaced=size == 2):
        training.join(200)
    assert training.error is None
    sizes, announced = zip(*training.result, strict=True)
    if moment < 150:  # The last steps may be over before the ranks have agreed.
        assert set(sizes) == {2 if size == 2 else 1}
        assert not any(announced)
    taken = [int(line) for line in (tmp_path / "steps").read_text().split()]
    assert taken == list(range(1, 201))


@contextlib.contextmanager
def taken_away(spark: Any, *, replaced: bool = True) -> Iterator[None]:
    """Announce that a worker's host goes, `replaced` by another, and within the block let Spark end its executors."""
    children = psutil.Process(Workers.here.processes[-1].pid).children()
    executor = next(child for child in children if child.name() == "java")  # Beside it may be a shell that has ended.
    Workers.here.take_away()
    if replaced:
        Workers.here.start()
    yield
    executor.wait(60)  # Spark ends it when the last of its tasks has ended.
    Workers.here.kill(-2 if replaced else -1)


class Slow(Callback):
    """A callback that takes long over a step, and writes down its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, state: TrainState) -> None:
        time.sleep(0.05)
        if state.rank == 0:
            write_down(self.folder, state.step)


def write_down(folder: Path, step: int) -> None:
    """Append the number of a step that rank 0 has taken, for the test that waits for it."""
    with (folder / "steps").open("a") as file:
        file.write(f"{step}\n")
    (folder / f"step-{step}").touch()


def counting(folder: str) -> tuple[int, bool]:
    """Count to 200, saved as rarely as it gets; return the world's size, and whether its end was announced."""
    world = tr.world()
    loaded = world.checkpoint.load()
    for step in range(1 if loaded is None else loaded.step + 1, 201):
        world.barrier()
        time.sleep(0.05)
        if world.rank == 0:
            write_down(Path(folder), step)
        world.checkpoint.save({"step": step}, step, every="1h")
    return world.size, world.preempted is not None


def events(run: Path) -> list[str]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "note"]
