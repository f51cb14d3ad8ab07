"""Hadoop YARN (driver)."""

from __future__ import annotations

from tritium.spark.cluster.base import Cluster


class Yarn(Cluster):
    """A YARN cluster, where an executor has one core by default."""

    default_cores = "1"
    replacement_seconds = 30.0  # A container is asked for, granted and started: 12 to 40 s were seen.
    why_lost = rf"{Cluster.why_lost}|exceeding|memory limits|Diagnostics"
