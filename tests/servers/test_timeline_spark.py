"""The timeline of a run on Spark has the tasks of its job, beside its ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tritium as tr
from tritium.spark.inside import SETTING


def train() -> None:
    world = tr.world()
    for epoch in world.shard("train").epochs(1, batch_size=100):
        for _ in epoch:
            world.barrier()


@pytest.mark.parametrize("inside", [True, False])
def test_sparks_tasks_are_beside_the_ranks(spark: SparkSession, tmp_path: Path, inside: bool) -> None:
    if not inside:
        spark.conf.set(SETTING, "-tasks")
    begun = time.time()
    try:
        data = {"train": spark.range(0, 1000, 1, 3)}
        tr.launch(train, ranks=2, data=data, trace=True, progress=False, run_dir=str(tmp_path))
    finally:
        spark.conf.unset(SETTING)
    timeline: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    entries = timeline["traceEvents"]
    assert {entry["pid"] for entry in entries if entry["name"] == "step"} == {0, 1}
    tasks = [entry for entry in entries if entry["name"].startswith("stage ")]
    if not inside:
        assert tasks == []
        return
    stages = {
        name: [e for e in tasks if e["name"].partition(",")[0] == name]
        for name in {e["name"].partition(",")[0] for e in tasks}
    }
    assert sorted(map(len, stages.values())) == [2, 4]  # The ranks; three partitions, and one of the anchors.
    assert all(begun - 1 < entry["ts"] / 1e6 < time.time() for entry in tasks)
    assert all(entry["args"]["status"] == "SUCCESS" for entry in tasks)
    ranks = max(stages.values(), key=lambda of_stage: max(entry["dur"] for entry in of_stage))
    steps = [entry for entry in entries if entry["name"] == "step"]
    first, last = min(e["ts"] for e in ranks), max(e["ts"] + e["dur"] for e in ranks)
    assert all(first <= step["ts"] <= last for step in steps), "ranks run within their tasks"
