"""Collectives of a value, such as Keras's front has: of what NumPy understands (rank)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritium_compat.horovod import arrays
from tritium_compat.horovod.basics import Average, global_process_set
from tritium_compat.horovod.torch.ops import reduction


def array(value: Any) -> Any:
    """Return a value as an array. Python's floats become float32, as in Keras."""
    if isinstance(value, float) or (isinstance(value, list) and np.asarray(value).dtype == np.float64):
        return np.asarray(value, np.float32)
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def allreduce(value: Any, name: Any, average: Any, before: float, after: float, op: Any) -> Any:
    """Return the average over all ranks, or what `op` says."""
    op = reduction(average, op)
    return arrays.allreduce([array(value)], name, op, before, after, global_process_set)[0]


def allgather(value: Any, name: str | None) -> Any:
    """Return the values of all ranks, concatenated."""
    return arrays.allgather([array(value)], name, global_process_set)[0]


def broadcast(value: Any, root_rank: int, name: str | None) -> Any:
    """Return the value of `root_rank`."""
    return arrays.broadcast([array(value)], root_rank, name, global_process_set)[0]


def reducescatter(value: Any, name: str | None, op: Any = Average) -> Any:
    """Return this rank's part of the rows of the average, or sum."""
    return arrays.reducescatter([array(value)], name, op, 1.0, 1.0, global_process_set)[0]
