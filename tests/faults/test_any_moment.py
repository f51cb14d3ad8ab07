"""Whole trainings that are killed at any moment, of any size and in any order, end with the right result."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import tritium as tr
from ranks import rank_below
from tritium.errors import RankFailed
from tritium.gang.driver import local_processes as driver_run

ROUNDS = int(os.environ.get("TRITIUM_FAULT_ROUNDS", "1"))
EPOCHS = 2

# A whole training is expensive, so failing ones are not shrunk.
trainings = settings(
    max_examples=max(3, ROUNDS),
    database=None,
    phases=[Phase.generate],
)


@dataclass(frozen=True)
class Training:
    """A linear regression by full steps of gradient descent, saved every so many steps; `moment` is 0 to 1."""

    rows: int
    batch_size: int
    ranks: int
    shuffle: str
    every: int
    moment: float
    victim: int

    def steps(self) -> int:
        """Return the steps of one epoch."""
        return math.ceil(math.ceil(self.rows / self.ranks) / self.batch_size)

    def killed_at(self) -> tuple[int, int]:
        """Return (epoch, step) of the kill."""
        return divmod(int(self.moment * EPOCHS * self.steps()), self.steps())


def of(shuffle: Any) -> st.SearchStrategy[Training]:
    made = st.builds(
        Training,
        rows=st.integers(12, 120),
        batch_size=st.integers(1, 12),
        ranks=st.integers(1, 3),
        shuffle=shuffle,
        every=st.integers(1, 4),
        moment=st.floats(0, 1, exclude_max=True),
        victim=st.integers(0, 2),
    )
    return made.filter(lambda training: training.steps() <= 30)


def train(training: Training, folder: str) -> tuple[list[float], list[float], dict[int, list[int]]]:
    """Train in a rank. Return the weights, the loss of each step, and by epoch the rows that count for the weights."""
    world = tr.world()
    weights, losses, taken, step = np.zeros(3), [], dict[int, list[int]](), 0
    saved = world.checkpoint.load()
    if saved is not None:
        weights, losses, step = saved["weights"], saved["losses"], saved.step
        for own in saved.own[world.rank :: world.size]:  # another number of ranks shares out what was taken
            for number, keys in own["taken"].items():
                taken[number] = taken.get(number, []) + keys
    resume = None if saved is None else [own["position"] for own in saved.own]
    shard = world.shard("train")
    order = {"batch_size": training.batch_size, "shuffle": training.shuffle, "seed": 7, "resume": resume}
    for epoch in shard.epochs(EPOCHS, **order):
        for batch in epoch:
            if (epoch.number, batch.step) == training.killed_at() and world.rank == training.victim % world.size:
                die_once(folder)
            x, y, keys = (np.array(batch[name][: batch.rows]) for name in ("x", "y", "key"))
            wrong = x @ weights - y[:, 0]
            sums = world.gather((x.T @ wrong, float(wrong @ wrong)))
            weights = weights - 0.1 * np.sum([gradient for gradient, _ in sums], axis=0) / batch.total
            losses.append(sum(loss for _, loss in sums) / batch.total)
            taken.setdefault(epoch.number, []).extend(keys.tolist())
            step += 1
            world.checkpoint.save(
                lambda weights=weights: {"weights": weights, "losses": losses},
                step,
                own=lambda: {"position": shard.state(), "taken": taken},
                every=training.every,
            )
    return weights.tolist(), losses, taken


def die_once(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(f"{folder}/killed", os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)


def run(training: Training, folder: str, *, ranks: int | None = None, retries: int = 2) -> list[Any]:
    random = np.random.default_rng(training.rows)
    x = random.normal(size=(training.rows, 3))
    columns = {f"x{i}": x[:, i] for i in range(3)} | {"y": x.sum(1), "key": np.arange(training.rows)}
    data = tr.Data(
        pa.table(columns),
        columns={"x": ["x0", "x1", "x2"], "y": ["y"], "key": "key"},
        shuffle=training.shuffle,
    )
    return tr.launch(
        train,
        ranks=ranks or training.ranks,
        on="driver",
        args=(training, folder),
        data={"train": data},
        run_dir=f"{folder}/run",
        retries=retries,
        progress=False,
        output="none",
    )


def each_row_once_an_epoch(training: Training, results: list[Any]) -> None:
    for number in range(EPOCHS):
        taken = Counter(key for *_, taken in results for key in taken.get(number, ()))
        assert taken == Counter(range(training.rows)), f"epoch {number}"


@trainings
@given(of(st.just("full")))
def test_at_the_same_world_size_it_is_as_never_interrupted_bit_for_bit(training: Training) -> None:
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as broken:
        Path(whole, "killed").touch()
        expected = run(training, whole)
        found = run(training, broken)
        assert Path(broken, "killed").exists()
        assert len(json.loads(Path(broken, "run", "report.json").read_text())["retries"]) == 1
    assert found == expected
    each_row_once_an_epoch(training, found)


@trainings
@given(of(st.sampled_from(["full", "stream"])), st.integers(1, 3))
def test_at_any_world_size_and_in_any_order_every_row_counts_once_an_epoch(training: Training, ranks: int) -> None:
    assume(training.shuffle == "stream" or ranks != training.ranks)
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(RankFailed, match="SIGKILL"):
            run(training, folder, retries=0)
        found = run(training, folder, ranks=ranks)
    each_row_once_an_epoch(training, found)


@pytest.mark.parametrize("shuffle", ["full", "stream"])
def test_a_rank_that_is_killed_before_its_rows_come_is_named_with_its_signal(
    shuffle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deal, me = driver_run.deal_tables, psutil.Process()
    others = me.children()

    def killing(batches: Iterator[pa.RecordBatch], moment: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one rank, whose process is killed when so many batches have come."""
        for number, batch in enumerate([*batches, None]):
            if number == moment:
                rank = rank_below(me, others)
                rank.kill()
                with contextlib.suppress(ChildProcessError):  # its supervisor has reaped it
                    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
            if batch is not None:
                yield batch

    for moment in (0, 1) * max(1, ROUNDS):
        folder = tempfile.mkdtemp(dir=tmp_path)

        def dealt(launch: Any, moment: int = moment) -> Any:
            plan, shards = deal(launch)
            return plan, [killing(shards[0], moment)]

        monkeypatch.setattr(driver_run, "deal_tables", dealt)
        with pytest.raises(RankFailed) as caught:
            run(Training(12, 4, 1, shuffle, 1, 0.0, 0), folder, retries=0)
        assert (caught.value.signal, caught.value.lost) == ("SIGKILL", True)
