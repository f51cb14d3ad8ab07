"""`horovod.torch` on PyTorch's own process groups (rank)."""

from tritium_compat.horovod import basics
from tritium_compat.horovod.basics import *  # noqa: F403
from tritium_compat.horovod.basics import Max, Min, Product
from tritium_compat.horovod.errors import HorovodInternalError
from tritium_compat.horovod.torch import elastic
from tritium_compat.horovod.torch.autograd import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from tritium_compat.horovod.torch.compression import Compression
from tritium_compat.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from tritium_compat.horovod.torch.moves import (
    allgather_async,
    alltoall_async,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_reducescatter_async,
    reducescatter_async,
    sparse_allreduce_async,
)
from tritium_compat.horovod.torch.ops import (
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    join,
    poll,
    synchronize,
)
from tritium_compat.horovod.torch.optimizer import DistributedOptimizer
from tritium_compat.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += basics.__all__
