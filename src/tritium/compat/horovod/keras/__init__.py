"""`horovod.keras`: for Keras 3 on any back end, and tf_keras (rank)."""

from __future__ import annotations

from typing import Any

import keras

from tritium.compat.horovod._keras import loading, values
from tritium.compat.horovod._keras.compression import Compression
from tritium.compat.horovod._keras.optimizer import distribute
from tritium.compat.horovod.basics import (
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
from tritium.compat.horovod.errors import HorovodInternalError
from tritium.compat.horovod.keras import callbacks, elastic
from tritium.compat.horovod.options import Options, groups_of, variables_of
from tritium.compat.horovod.torch.functions import allgather_object, broadcast_object

_tensor = keras.ops.convert_to_tensor


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
    options = Options(
        name=name or f"Distributed{type(optimizer).__name__}",
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local=scale_local_gradients,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
    )
    return distribute(optimizer, options)


def PartialDistributedOptimizer(
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
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return such an optimizer that leaves the gradients of `local_layers` to each rank, divided by their number."""
    local = variables_of(local_layers)
    made = DistributedOptimizer(
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local:
        made.register_local_var(variable)
    return made


def broadcast_global_variables(root_rank: int) -> None:
    """Say that eager mode has no global variables. Raises RuntimeError."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() has no variables to send in eager mode. Give fit() the callback "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(0)."
    )


def allreduce(
    value: Any,
    name: str | None = None,
    average: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the average over all ranks, or what `op` says, of a tensor or what can become one."""
    sent, kind = compression.compress(_tensor(value))
    found = _tensor(values.allreduce(sent, name, average, prescale_factor, postscale_factor, op))
    return compression.decompress(found, kind)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, concatenated along their first dimension, which may differ."""
    return _tensor(values.allgather(value, name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of `root_rank`."""
    return _tensor(values.broadcast(value, root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """Return this rank's part of the rows of the average, or sum, over all ranks."""
    return _tensor(values.reducescatter(value, name, op))


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model whose optimizer has the state that was saved, and reduces gradients over all ranks.

    custom_optimizers : classes. custom_objects : name -> class or function. legacy_opts : is not needed.
    """
    return loading.load_model(keras, filepath, custom_optimizers, custom_objects, compression)


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
