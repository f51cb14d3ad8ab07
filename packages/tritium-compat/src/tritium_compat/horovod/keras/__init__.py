"""`horovod.keras`: for Keras 3 on any back end, and tf_keras (rank)."""

from __future__ import annotations

from typing import Any

import keras

from tritium_compat.horovod import basics
from tritium_compat.horovod._keras.compression import Compression
from tritium_compat.horovod._keras.front import Front, distributed
from tritium_compat.horovod.basics import *  # noqa: F403
from tritium_compat.horovod.basics import Average, ProcessSet, global_process_set
from tritium_compat.horovod.errors import HorovodInternalError
from tritium_compat.horovod.keras import callbacks, elastic
from tritium_compat.horovod.options import groups_of
from tritium_compat.horovod.torch.functions import allgather_object, broadcast_object

_front = Front(keras, keras.ops.convert_to_tensor, Compression.none)
PartialDistributedOptimizer = _front.PartialDistributedOptimizer
broadcast_global_variables = _front.broadcast_global_variables
allreduce, allgather, broadcast = _front.allreduce, _front.allgather, _front.broadcast
reducescatter, load_model = _front.reducescatter, _front.load_model


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: str = Average,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer like this one, which reduces gradients over all ranks before it applies them.

    The arguments mean what they mean in Horovod; `device_dense` and `device_sparse` have no effect.
    """
    return distributed(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        scale_local_gradients=scale_local_gradients,
    )


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += basics.__all__
