"""Executors have GPUs, pretended by a discovery script, and the session's tasks have none: gangs bring their own.

ETL on CPUs and training on GPUs share one application. No GPU is needed here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from clusters import set_to
from tritium.errors import BadSetting, NotEnoughSlots
from tritium.spark.cluster import cluster_of
from tritium.spark.inside import SETTING

pytestmark = pytest.mark.timeout(300)


def where() -> tuple[str, str, str, tuple[str, ...]]:
    world = tr.world()
    devices = tuple(device.address for device in world.peers[world.rank].devices)
    return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["HIP_VISIBLE_DEVICES"], world.device, devices


def launch(spark: Any, **settings: Any) -> list[Any]:
    quiet = {"progress": False, "output": "none", "start_timeout": 120, "retries": 0}
    return tr.launch(where, spark=spark, **{**quiet, **settings})


def etl(spark: Any) -> int:
    """Return the sum of a job whose tasks have no GPUs, and take all cores."""
    return int(spark.range(0, 1000, 1, 8).selectExpr("sum(id) as sum").first()["sum"])


@pytest.mark.parametrize("cluster", ["gpus-of-executors"], indirect=True)
class TestWhereTheSessionsTasksHaveNone:
    """Two executors of two GPUs and two cores each."""

    def test_each_rank_has_its_own(self, cluster: Any) -> None:
        assert etl(cluster.spark) == 499500
        assert cluster_of(cluster.spark).slots(tr.Gang(gpus=1)) == 4
        own = [("0,1", "0,1", f"cuda:{rank % 2}", (str(rank % 2),)) for rank in range(4)]
        assert launch(cluster.spark, ranks=4, gpus=1) == own
        assert launch(cluster.spark, ranks=2, gpus=2) == [("0,1", "0,1", "cuda:0", ("0", "1"))] * 2
        assert etl(cluster.spark) == 499500, "tasks of the session have none again"

    def test_rows_of_tasks_without_any_go_to_ranks_with_one(self, cluster: Any) -> None:
        def train() -> float:
            (epoch,) = tr.world().shard("train").epochs(1, batch_size=64)
            return sum(tr.world().gather(sum(float(batch["id"][: batch.rows].sum()) for batch in epoch)))

        frame = cluster.spark.range(0, 1000, 1, 8)
        settings: dict[str, Any] = {"ranks": 2, "gpus": 1, "progress": False, "output": "none"}
        assert tr.launch(train, data={"train": frame}, **settings) == [499500.0] * 2

    def test_two_ranks_share_one(self, cluster: Any, tmp_path: Path) -> None:
        found = cluster_of(cluster.spark)
        assert found.slots(tr.Gang(gpus=0.5)) == 4, "there are no more cores"
        run = tmp_path / "run"
        results = launch(cluster.spark, ranks=4, gpus=0.5, run_dir=str(run))
        assert len({devices for *_, devices in results}) < 4
        for visible, hip, device, (address,) in results:
            assert visible == hip
            assert visible.split(",")[int(device.removeprefix("cuda:"))] == address
        notes = [e["text"] for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if "text" in e]
        assert "gpus=0.5: 2 ranks share a device" in notes
        ranks = json.loads((run / "report.json").read_text())["ranks"]
        assert [rank["devices"] for rank in ranks] == [[{"address": address}] for *_, (address,) in results]

    def test_a_kind_that_no_executor_can_read(self, cluster: Any) -> None:
        with pytest.raises(BadSetting, match=r"gpu_type=\['H100'\]: the kind of GPU '.' of task 0 on .* can't be read"):
            launch(cluster.spark, ranks=2, gpus=1, gpu_type="H100")

    def test_more_than_an_executor_has_and_another_resource(self, cluster: Any) -> None:
        with pytest.raises(NotEnoughSlots, match=r"needs 3 GPU\(s\) .*has 2 \(spark\.executor\.resource\.gpu\.am"):
            launch(cluster.spark, gpus=3)
        with pytest.raises(NotEnoughSlots, match=r"needs 1 npu .*spark\.executor\.resource\.npu\.amount set"):
            launch(cluster.spark, gpus=1, accelerator="npu")


@pytest.mark.parametrize("cluster", ["gpus-dynamic"], indirect=True)
def test_with_dynamic_allocation_a_gang_has_executors_of_its_own(cluster: Any, tmp_path: Path) -> None:
    """A profile of tasks alone would have ended the application: Spark stopped its context."""
    assert etl(cluster.spark) == 499500
    results = launch(cluster.spark, ranks=2, gpus=1, run_dir=str(tmp_path / "run"))
    assert [result[2:] for result in results] == [("cuda:0", ("0",)), ("cuda:1", ("1",))]
    assert "executors of their own" in (tmp_path / "run" / "events.jsonl").read_text()
    with pytest.raises(NotEnoughSlots, match=r"with spark\.dynamicAllocation\.maxExecutors=1 .* never more than 2"):
        launch(cluster.spark, ranks=3, gpus=1)
    assert etl(cluster.spark) == 499500


@pytest.mark.parametrize("cluster", ["gpus-connect"], indirect=True)
def test_over_connect(cluster: Any) -> None:
    assert etl(cluster.spark) == 499500
    assert [result[2:] for result in launch(cluster.spark, ranks=2, gpus=1)] == [("cuda:0", ("0",)), ("cuda:1", ("1",))]
    assert [result[2:] for result in launch(cluster.spark, ranks=1, gpus=2)] == [("cuda:0", ("0", "1"))]
    with pytest.raises(NotEnoughSlots, match="an executor has 2"):
        launch(cluster.spark, gpus=3)
    without = pytest.raises(BadSetting, match=r"with spark\.task\.cpus=1 and spark\.task\.resource\.gpu\.amount=1\.")
    with set_to(cluster.spark, **{SETTING: "-profiles"}), without:
        launch(cluster.spark, gpus=1)
