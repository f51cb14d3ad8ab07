"""Executors that Spark decommissions, as their hosts are about to be taken away (driver)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tritium.spark.cluster.base import Cluster
from tritium.spark.inside import scheduler

ENABLED = "spark.decommission.enabled"


def leaving(cluster: Cluster, executors: Iterable[str]) -> tuple[set[str], float]:
    """Return those of these executors that Spark is decommissioning, and the seconds that they have from then on.

    None where the session does not let Spark do that, or its scheduler can't be asked; inf where the time has no limit.
    """
    session = cluster.session
    if session.setting(ENABLED, "false").lower() != "true" or not scheduler.used(session.spark):
        return set(), math.inf
    going = scheduler.leaving(session, executors)
    return going, (scheduler.seconds(session, *cluster.leaving_limit) or math.inf) if going else math.inf
