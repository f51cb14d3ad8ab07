"""`horovod.tensorflow` on PyTorch's process groups (rank)."""

from __future__ import annotations

import importlib
from typing import Any

from tritium_compat.horovod import basics
from tritium_compat.horovod.basics import *  # noqa: F403
from tritium_compat.horovod.basics import Max, Min, Product
from tritium_compat.horovod.errors import HorovodInternalError
from tritium_compat.horovod.tensorflow import elastic
from tritium_compat.horovod.tensorflow.compression import Compression
from tritium_compat.horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from tritium_compat.horovod.tensorflow.numbers import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from tritium_compat.horovod.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from tritium_compat.horovod.tensorflow.optimizer import DistributedOptimizer
from tritium_compat.horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from tritium_compat.horovod.torch.ops import barrier


def __getattr__(name: str) -> Any:
    if name != "SyncBatchNormalization":  # which imports Keras
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.sync_batch_norm").SyncBatchNormalization


__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "Product",
    "SyncBatchNormalization",  # noqa: F405 (made on demand, below)
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += basics.__all__
