"""A stream whose driver and executors are killed and whose broker restarts at random moments loses no event.

`TRITIUM_FAULT_ROUNDS` rounds with other seeds each; a seed is in the name of its test.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tritium as tr
from broker import Broker, jars, running_broker
from tritium.model.signature import Input, Output, Signature

FOLDER = Path(__file__).parents[1] / "kafka"
ROUNDS = int(os.environ.get("TRITIUM_FAULT_ROUNDS", "2"))
EVENTS, WINDOW, PATIENCE = 120, 25.0, 500.0
SIGNATURE = Signature((Input("features", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),), "regression")


def model(bias: float) -> tr.Model:
    module = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(module.weight)
    torch.nn.init.constant_(module.bias, bias)
    return tr.Model(module, SIGNATURE)


class Round:
    """A driver that is started again whenever it has ended before each event was scored."""

    def __init__(self, folder: Path, one: Broker, paths: str) -> None:
        self.folder, self.broker = folder, one
        self._command = [sys.executable, str(FOLDER / "killed.py"), one.address, str(folder), paths]
        self.starts = 0
        self.driver = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        scratch = self.folder / "scratch"  # A driver that is killed leaves files behind.
        scratch.mkdir(exist_ok=True)
        environment = os.environ | {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch)}
        with open(self.folder / f"driver-{self.starts}", "wb") as out:
            return subprocess.Popen(
                self._command, stdout=out, stderr=out, start_new_session=True, cwd=self.folder, env=environment
            )

    def processes(self) -> list[psutil.Process]:
        """Return the JVMs of the executors."""
        try:
            children = psutil.Process(self.driver.pid).children(recursive=True)
            return [p for p in children if "CoarseGrainedExecutorBackend" in " ".join(p.cmdline())]
        except psutil.Error:
            return []

    def hit(self, fault: str) -> None:
        """Do what the fault's name says."""
        if fault == "driver":
            self.end()
            self.driver = self._start()
        elif fault == "executor":
            for process in self.processes()[:1]:
                process.kill()
        else:
            self.broker.kill()
            self.broker.start()

    def end(self) -> None:
        """Kill the driver with its JVM and executors."""
        if self.driver.poll() is None:
            os.killpg(self.driver.pid, signal.SIGKILL)
        self.driver.wait()

    def finish(self) -> None:
        """Return when each event is scored. A driver that ends before is started again."""
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / "done").exists() or self.driver.poll() is None:
            if self.driver.poll() is not None and not (self.folder / "done").exists():
                self.driver = self._start()
            assert time.monotonic() < deadline, (self.folder / f"driver-{self.starts}").read_text()[-3000:]
            time.sleep(0.2)


@pytest.fixture(scope="module")
def paths() -> str:
    profiles = ("connector", "delta")
    return ",".join(str(jar) for profile in profiles for jar in sorted(jars(profile).glob("*.jar")))


@pytest.fixture
def one_broker() -> Iterator[Broker]:
    with running_broker() as one:
        yield one


@pytest.mark.kafka
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_no_event_is_lost_and_none_is_doubled(seed: int, paths: str, one_broker: Broker, tmp_path: Path) -> None:
    draw = random.Random(seed)
    tr.publish(model(0), str(tmp_path / "models"))
    run(tmp_path, "write_events.py", one_broker.address, str(EVENTS), paths)
    faults = sorted(
        (draw.uniform(0, WINDOW), fault) for fault in draw.sample(["driver", "executor", "broker", "driver"], k=3)
    )
    begun, this = time.monotonic(), Round(tmp_path, one_broker, paths)
    try:
        for moment, fault in faults:
            time.sleep(max(0.0, begun + moment - time.monotonic()))  # The moment is what is random.
            this.hit(fault)
        this.finish()
    finally:
        this.end()
    run(tmp_path, "read_all.py", one_broker.address, str(tmp_path), paths)
    read: dict[str, Any] = json.loads((tmp_path / "read.json").read_text())
    figures = {"seed": seed, "faults": faults, "starts": this.starts, "written": read["written"]}
    print(figures)
    assert sorted(read["once"]) == list(range(EVENTS)), figures
    assert sorted(read["delta"]) == list(range(EVENTS)), figures
    assert all(prediction == id_ + 1 for id_, prediction in read["predictions"]), figures
    assert read["written"] >= EVENTS


def run(folder: Path, script: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
