"""Kafka → enrich → Kafka on a real broker: the driver killed in a micro-batch, and the page's programs."""

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

import advice
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


PAGE = Path(__file__).parents[2] / "docs" / "prediction.md"
# What the page's programs take as given, and what comes of them.
MODELS = """
import json
import torch
from tritium.model.signature import Input, Output, Signature

def saved(path, bias):
    module = torch.nn.Linear(3, 1)
    torch.nn.init.ones_(module.weight)
    torch.nn.init.constant_(module.bias, bias)
    inputs = (Input("features", ("temp", "hum", "hr"), "float32", (3,)),)
    tr.Model(module, Signature(inputs, (Output("y", shape=(1,)),), "regression")).save(path)

saved("models/bikes-by-hand", 0)
saved("models/second", 100)

def produce(*values):
    rows = spark.createDataFrame([(value,) for value in values], "value string")
    rows.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", "events").save()

def predictions():
    rows = [json.loads(row[0]) for row in once.select(F.col("value").cast("string")).collect()]
    return sorted(rows, key=lambda row: row.get("id", 0))

produce('{"id": 1, "temp": 1, "hum": 2, "hr": 3}', '{"id": 2, "temp": 1, "hr": 3}', "no JSON")
"""
SCORED = """
query.processAllAvailable()
query.stop()
assert predictions() == [{}, {"id": 1, "prediction": 6.0}, {"id": 2}], predictions()
open("models/newest", "w").write("models/bikes-by-hand")
"""
SWAPPED = """
swapping.processAllAvailable()
open("models/newest", "w").write("models/second")
produce('{"id": 3, "temp": 1, "hum": 2, "hr": 4}')
swapping.processAllAvailable()
swapping.stop()
assert predictions()[-1] == {"id": 3, "prediction": 107.0}, predictions()
assert list(loaded) == ["models/second"]
spark.stop()
print("done")
"""


@pytest.mark.kafka
@pytest.mark.timeout(240)
def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    scores, reads, swaps = (code for _, code in advice.blocks(PAGE, "python") if "servers" in code)
    begin, load, rest = scores.partition("model = ")
    here = {
        "spark.jars": ",".join(map(str, jars("connector").glob("*.jar"))),  # of the version that can be had here
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "1",
    }
    packages = '.config("spark.jars.packages", connector)'
    assert packages in begin
    begin = begin.replace(packages, "".join(f".config({name!r}, {value!r})" for name, value in here.items()))
    with broker() as address:
        assert '"localhost:9092"' in begin
        begin = begin.replace('"localhost:9092"', repr(address))
        program = "\n".join([begin, MODELS, load + rest, reads, SCORED, swaps, SWAPPED])
        (tmp_path / "page.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
        )
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]


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
