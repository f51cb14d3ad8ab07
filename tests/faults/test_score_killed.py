"""Scorings that are killed at seeded moments, driver or executor, end with every row exactly once.

A chain is one scoring that is killed KILLS times, and started again. A moment is a number of rows that the model was
called with since the kill before. There are `TRITIUM_FAULT_ROUNDS` kills: half of them while it writes Parquet, half of
them while it writes Delta.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from pyspark.find_spark_home import _find_spark_home
from torch import nn

import clusters
import tritium as tr
from broker import jars
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature
from tritium.predict.ledger import Ledger

ROUNDS = int(os.environ.get("TRITIUM_FAULT_ROUNDS", "1"))
KILLS = 5
CHAINS = [(("parquet", "delta")[number % 2], number) for number in range(max(1, ROUNDS // KILLS))]
ROWS, PARTITIONS, BATCH = 3200, 32, 20
PATIENCE = 600.0
SIGNATURE = Signature((Input("x", ("a",), "float32", (1,)),), (Output("y", shape=(1,)),), "regression")
DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
}
CODE = """
import sys
sys.path[:0] = {path!r}
import test_score_killed
test_score_killed.drive({place!r}, {into!r}, {conf!r})
"""


class Slow(nn.Module):
    """A model that takes 50 ms a call, and writes down how many rows it was called with."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.line = nn.Linear(1, 1)
        with torch.no_grad():
            self.line.weight.fill_(2.0)
            self.line.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(os.path.join(self.place, f"rows-{os.getpid()}"), "a") as file:
            file.write(f"{len(x)}\n")
        time.sleep(0.05)
        return self.line(x)


def drive(place: str, into: str, conf: dict[str, str]) -> None:
    """Score in the process that will be killed."""
    clusters.COMMON.update(conf)
    with clusters.session("local-cluster") as spark:
        Path(place, "application").write_text(spark.sparkContext.applicationId)
        model = TorchModel(tr.Model(Slow(place), SIGNATURE), batch_size=BATCH)
        df = spark.range(0, ROWS, 1, PARTITIONS).selectExpr("id", "CAST(id AS FLOAT) a")
        model.score(df, into=into, resume=f"{place}/resume", verbose=False)
        kind = into.partition(":")[0]
        written = spark.read.format(kind).load(f"{place}/scored")
        Path(place, "done").write_text(json.dumps([[row.id, row.prediction] for row in written.collect()]))


def called_rows(place: Path) -> int:
    return sum(sum(map(int, file.read_text().split())) for file in place.glob("rows-*"))


def unfinished_rows(place: Path) -> int:
    parts = Ledger(f"{place}/resume").parts() if place.joinpath("resume").exists() else []
    return sum(part.count for part in parts if part.fingerprint is None) * (ROWS // PARTITIONS)


@contextmanager
def running(place: Path, into: str, conf: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    code = CODE.format(path=[str(Path(__file__).parent), *sys.path], place=str(place), into=into, conf=conf)
    place.joinpath("application").unlink(missing_ok=True)
    with place.joinpath("stderr").open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=place, stderr=stderr)
    children: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        process.wait()
        psutil.wait_procs(children, 30)
        if place.joinpath("application").exists():  # Spark leaves it in its own home.
            work = Path(_find_spark_home(), "work", place.joinpath("application").read_text())
            shutil.rmtree(work, ignore_errors=True)


def wait_until(place: Path, rows: int, process: subprocess.Popen[bytes]) -> None:
    """Return when the model was called with so many rows, or the process has ended."""
    clusters.wait(lambda: called_rows(place) >= rows or process.poll() is not None, "a moment", PATIENCE)


def executors(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the JVMs of the executors that run now."""
    running = []
    for one in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()):
                running.append(one)
    return running


def killed(process: subprocess.Popen[bytes], victim: str) -> bool:
    """Kill the driver, alone or with all that it has started, or an executor. Return whether the driver is dead."""
    if victim == "executor":
        with suppress(psutil.NoSuchProcess):
            clusters.wait(lambda: bool(executors(process)), "an executor", PATIENCE)
            executors(process)[0].kill()
        return False
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in children if victim == "cluster" else ():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(children, 30)
    return True


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "seed"), CHAINS)
def test_every_row_exactly_once(tmp_path: Path, kind: str, seed: int) -> None:
    draw = random.Random(seed)
    conf = {**DELTA, "spark.jars": ",".join(map(str, jars("delta").glob("*.jar")))} if kind == "delta" else {}
    into = f"{kind}:{tmp_path}/scored"
    victims = ["driver", "cluster", "executor", *draw.choices(["driver", "cluster", "executor"], k=KILLS - 3)]
    draw.shuffle(victims)
    plan = [(victim, draw.randrange(1, ROWS // (KILLS + 1))) for victim in victims]
    lost, tasks, left, before = 0, 0, list(plan), 0
    while not tmp_path.joinpath("done").exists():
        with running(tmp_path, into, conf) as process:
            is_dead = False
            while left and not is_dead:
                victim, rows = left.pop(0)
                wait_until(tmp_path, before + rows, process)
                assert process.poll() is None, f"{plan}: {tmp_path.joinpath('stderr').read_text()[-4000:]}"
                is_dead = killed(process, victim)
                before = called_rows(tmp_path)
                lost += unfinished_rows(tmp_path) if is_dead else 0
                tasks += not is_dead
            process.wait(PATIENCE)
        errors = tmp_path.joinpath("stderr").read_text()[-4000:]
        assert process.returncode == (-9 if is_dead else 0), f"{plan}, {len(left)} left: {errors}"
    rows = sorted(map(tuple, json.loads(tmp_path.joinpath("done").read_text())))
    assert rows == [(number, 2.0 * number) for number in range(ROWS)], plan
    called = called_rows(tmp_path)
    print(f"\n{kind} seed {seed}: {plan}, {called - ROWS} of {ROWS} rows computed twice, at most {lost} in flight")
    # An executor has one core here: one task, and one that Spark had given it.
    assert called <= ROWS + lost + tasks * 2 * (ROWS // PARTITIONS), plan
    assert not list(tmp_path.glob("scored/_tritium*"))
