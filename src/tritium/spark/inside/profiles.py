"""Resource profiles over Spark Connect, whose client makes them for the active session of a thread only (driver)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritium.spark import is_connect
from tritium.spark.inside import Inside


def probe(spark: Any) -> str | None:
    """Return why this session's client makes no profiles; None where it does, and in a classic session."""
    if not is_connect(spark) or hasattr(spark.client, "_create_profile"):
        return None
    return "this client of Spark makes no resource profiles"


used = Inside("profiles", probe, needs_jvm=False)


@dataclass(frozen=True)
class ServerProfile:
    """A profile that the server has made, as `mapInArrow` reads it."""

    id: int


def made(spark: Any, amounts: Mapping[str, float]) -> ServerProfile:
    """Have the server make a profile of tasks with these amounts of resources."""
    import pyspark.sql.connect.proto as protocol

    requests = {
        name: protocol.TaskResourceRequest(resource_name=name, amount=amount) for name, amount in amounts.items()
    }
    profile = protocol.ResourceProfile(executor_resources={}, task_resources=requests)
    return ServerProfile(spark.client._create_profile(profile))
