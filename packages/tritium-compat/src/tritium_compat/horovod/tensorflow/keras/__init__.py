"""`horovod.tensorflow.keras`: for `tf.keras`, which is Keras 3 or tf_keras (rank)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tritium_compat.horovod._keras.front import Front, distributed
from tritium_compat.horovod.basics import (
    Adasum,
    Average,
    ProcessSet,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from tritium_compat.horovod.errors import HorovodInternalError
from tritium_compat.horovod.options import groups_of
from tritium_compat.horovod.tensorflow.compression import Compression
from tritium_compat.horovod.tensorflow.functions import allgather_object, broadcast_object
from tritium_compat.horovod.tensorflow.keras import callbacks, elastic

_front = Front(tf.keras, tf.convert_to_tensor, Compression.none)
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
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
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
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
