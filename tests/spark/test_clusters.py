"""The fixtures themselves: each kind of cluster runs a job, and leaks of a test are named."""

from __future__ import annotations

from typing import Any


def test_each_kind_of_cluster_runs_a_job(cluster: Any) -> None:
    rows = cluster.spark.range(0, 100, 1, 4).mapInArrow(lambda batches: batches, "id long").collect()
    assert sorted(row.id for row in rows) == list(range(100))
