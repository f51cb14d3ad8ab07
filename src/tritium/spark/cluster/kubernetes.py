"""Kubernetes (driver)."""

from __future__ import annotations

from tritium.spark.cluster.base import Cluster


class Kubernetes(Cluster):
    """A Kubernetes cluster, where an executor is a pod, of one core by default."""

    default_cores = "1"
    why_lost = rf"{Cluster.why_lost}|OOMKilled|The API gave the following (?:brief reason|message): (?!N/A|null)"
