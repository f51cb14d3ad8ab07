"""Kafka → enrich → Kafka on a real broker: the driver killed in a micro-batch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tritium as tr
from broker import broker, jars
from tritium.model.signature import Input, Output, Signature

ENRICH = Path(__file__).parents[1] / "kafka" / "enrich.py"
EVENTS, STUCK = 40, 33


class Stuck(nn.Module):
    """A model that adds a and b. At one event it reports and blocks for ever, while the pipe at `place` exists."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.weight = nn.Parameter(torch.ones(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.path.exists(self.place) and (x[:, 0] > STUCK / 10 - 0.01).any():
            with open(self.place, "w") as pipe:
                print("stuck", file=pipe, flush=True)
                select.select([], [], [])
        return x @ self.weight


@pytest.mark.kafka
@pytest.mark.timeout(240)
def test_a_killed_query_loses_nothing_and_repeats_recognisably(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    signature = Signature((Input("features", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),), "regression")
    connector = str(jars("connector"))
    tr.Model(Stuck(str(pipe)), signature).save(str(tmp_path / "model"))
    with broker() as address:
        os.mkfifo(pipe)
        with _driver(tmp_path, address, connector, "produce") as killed:
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            try:
                assert _stuck(reader, killed), (tmp_path / "produce").read_text()[-3000:]
                os.killpg(killed.pid, signal.SIGKILL)
            finally:
                os.close(reader)
            killed.wait()
        pipe.unlink()
        with _driver(tmp_path, address, connector, "finish") as finished:
            assert finished.wait(120) == 0, (tmp_path / "finish").read_text()[-3000:]
    records, once = _json(tmp_path / "written"), _json(tmp_path / "once")
    assert len(records) > EVENTS  # partition 0 of the killed micro-batch was written twice
    copies = defaultdict(list)
    for record in records:
        event = json.loads(record["value"])
        assert event["prediction"] == pytest.approx(event["a"] + event["b"], abs=1e-5)
        assert record["key"] == f"key-{event['id']}"
        copies[record["topic"], record["partition"], record["offset"]].append(record)
    assert len(copies) == EVENTS
    assert all(same == [same[0]] * len(same) for same in copies.values())
    assert {topic for topic, _, _ in copies} == {"events"}
    assert sorted(json.loads(r["value"])["id"] for r in once) == list(range(EVENTS))


def _driver(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    address, connector, step = arguments
    with open(folder / step, "wb") as out:
        command = [sys.executable, str(ENRICH), address, str(folder), connector, step]
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


def _stuck(reader: int, driver: subprocess.Popen[bytes]) -> bool:
    """Wait for the model to report that it blocks. Return False where the driver ended before."""
    while driver.poll() is None:
        ready, _, _ = select.select([reader], [], [], 0.5)
        if ready and b"stuck" in os.read(reader, 100):
            return True
    return False


def _json(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob("*.json") for line in file.read_text().splitlines()]
