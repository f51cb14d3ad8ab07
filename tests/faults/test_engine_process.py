"""The engine process of a device under Spark: four tasks share it, it or a worker is killed, the session ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import tritium as tr
from device_processes import end, running
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature

ROWS, FATAL = 4000, 2900
on_device = pytest.mark.parametrize("cluster", ["pretended-device"], indirect=True)
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(sys.platform != "linux", reason="for Linux")]


class Module(nn.Module):
    """Multiplies, and writes each load and the process of it; kills that process once at a row, if `fatal`."""

    def __init__(self, by: float, place: str, fatal: bool = False) -> None:
        super().__init__()
        self.by, self.place, self.fatal = nn.Parameter(torch.tensor([float(by)])), place, fatal

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        with open(os.path.join(self.place, "loads"), "a") as file:
            file.write(f"{os.getpid()}\n")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fatal and (x == FATAL).any():
            once(self.place)
        return x * self.by


def once(place: str) -> None:
    """Kill this process, the first time."""
    try:
        os.mkdir(os.path.join(place, "killed"))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def model(by: float, place: Path, fatal: bool = False, **example: Any) -> TorchModel:
    signature = Signature((Input("x", ("number",), "float32", (1,)),), (Output("y", shape=(1,)),))
    module = Module(by, str(place), fatal)
    inner = tr.Model(module, **example) if example else tr.Model(module, signature)
    return TorchModel(inner, device="cpu:0", batch_size=100, prediction_col=f"times_{by:g}")


def numbers(spark: Any) -> Any:
    return spark.range(0, ROWS, 1, 8).selectExpr("id", "cast(id as float) as number", "cast(id as string) as text")


def loads(place: Path) -> list[int]:
    return [int(pid) for pid in place.joinpath("loads").read_text().split()]


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    end()


@on_device
def test_four_tasks_and_two_models_of_a_plan_use_one_process(cluster: Any, tmp_path: Path) -> None:
    both = model(3, tmp_path).transform(model(2, tmp_path).transform(numbers(cluster.spark)))
    rows = both.collect()
    assert len(rows) == ROWS
    assert all((row.times_2, row.times_3) == (2 * row.id, 3 * row.id) for row in rows)
    (process,) = running()
    assert loads(tmp_path) == [process.pid] * 2


@on_device
def test_the_engine_process_is_killed(cluster: Any, tmp_path: Path) -> None:
    rows = model(2, tmp_path, fatal=True).transform(numbers(cluster.spark)).collect()
    assert sorted((row.id, row.times_2) for row in rows) == [(number, 2 * number) for number in range(ROWS)]
    first, second = loads(tmp_path)
    assert [process.pid for process in running()] == [second] != [first]


@on_device
def test_a_worker_is_killed_and_the_others_go_on(cluster: Any, tmp_path: Path) -> None:
    place = str(tmp_path)

    def decode(text: str) -> Any:
        import numpy

        if text == str(FATAL):
            once(place)
        return numpy.array([float(text)], numpy.float32)

    scored = model(2, tmp_path, example={"text": ["1"]}, decode={"text": decode}).transform(numbers(cluster.spark))
    rows = scored.collect()
    assert tmp_path.joinpath("killed").exists()
    assert sorted((row.id, row.times_2) for row in rows) == [(number, 2 * number) for number in range(ROWS)]
    assert [process.pid for process in running()] == loads(tmp_path)


PROGRAM = """
import os, sys
import psutil
sys.path.insert(0, {tests!r})
import clusters
from faults.test_engine_process import loads, model, numbers
from pathlib import Path

with clusters.session("pretended-device") as spark:
    place = Path({place!r})
    model(2, place).transform(numbers(spark)).collect()
    if {kill}:
        jvm = next(child for child in psutil.Process().children() if "java" in child.name())
        jvm.kill()
        os._exit(0)
"""


@pytest.mark.parametrize("kill", [False, True], ids=["the session ends", "the executor is killed"])
def test_nothing_is_left_behind(kill: bool, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]), place=str(tmp_path), kill=kill)
    environment = {**os.environ, "SPARK_LOCAL_DIRS": str(scratch), "TMPDIR": str(scratch)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True, timeout=240)
    (pid,) = loads(tmp_path)
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(30)  # Far less than a minute, for which it waits for a task.
    left = [path for path in scratch.rglob("*") if path.is_socket() or "engine" in path.name]
    assert left == []
    assert kill or not [path for path in scratch.rglob("*") if "tritium" in path.name]
