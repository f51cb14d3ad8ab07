"""`horovod.spark.task`: what a Spark task has been given (rank)."""

from __future__ import annotations

import os


def get_available_devices() -> list[str]:
    """Return the indices of the GPUs that Spark has assigned to this rank; none without GPUs."""
    from tritium import world

    device = world().device
    if not device.startswith("cuda"):
        return []
    given = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    return given or [device.partition(":")[2]]


__all__ = ["get_available_devices"]
