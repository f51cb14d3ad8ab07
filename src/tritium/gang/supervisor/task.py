"""The entry of a gang's task, called by `mapInArrow` in Spark's Python worker (supervisor)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from tritium.gang.order import Order
from tritium.gang.supervisor.ending import GangEnded
from tritium.gang.supervisor.supervisor import Supervisor
from tritium.spark.inside.end_of_stream import stream_is_complete

Run = Callable[[Supervisor, Any], Iterator[pa.RecordBatch]]


def supervise(payload: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run the supervisor of this task, and yield its rank's result as rows.

    payload : a pickled Order.
    """
    return in_task(payload, lambda supervisor, _: supervisor.run(batches, stream_is_complete))


def in_task(payload: bytes, run: Run) -> Iterator[pa.RecordBatch]:
    """Yield from `run(supervisor, context)`, with a supervisor for this Spark task. `payload`: a pickled Order."""
    from pyspark import TaskContext

    order: Order = pickle.loads(payload)
    context = TaskContext.get()
    assert context is not None
    assigned = context.resources().get(order.accelerators.resource)
    gpus = tuple(assigned.addresses)[: order.accelerators.whole] if assigned else ()
    cpus = order.cpus or context.cpus()
    ids = {"partition": context.partitionId(), "attempt": context.taskAttemptId()}
    supervisor = Supervisor(order, **ids, gpus=gpus, cpus=cpus, daemon=os.getppid())
    try:
        yield from run(supervisor, context)
    except GangEnded:
        if not supervisor.ending.dismissed:
            raise
        # The driver raises the error: an exception here would add 40 lines to Spark's log for each rank.
