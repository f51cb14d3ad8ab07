"""Spark's own cluster manager: `spark://host:7077`, and `local-cluster[…]`, which tests use (driver)."""

from __future__ import annotations

import re

from tritium.spark.cluster.base import Cluster


class Standalone(Cluster):
    """A standalone cluster: an executor has all cores of its worker, unless a setting says otherwise."""

    more_slots = "spark.executor.instances, spark.executor.cores, spark.cores.max"

    def expected_executors(self) -> int:
        local_cluster = re.match(r"local-cluster\[\s*(\d+)", self.master)
        return int(local_cluster[1]) if local_cluster else super().expected_executors()
