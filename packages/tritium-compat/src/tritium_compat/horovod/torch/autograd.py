"""The collectives that wait, through which gradients flow (rank)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tritium_compat.horovod import context as contexts
from tritium_compat.horovod.basics import Average, ProcessSet, Sum, global_process_set
from tritium_compat.horovod.torch import moves, ops
from tritium_compat.horovod.torch.compression import Compression
from tritium_compat.horovod.torch.ops import synchronize

_Function: Any = torch.autograd.Function


class _Allreduce(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, scales: tuple[Any, ...], name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.scales = scales
        op, before, after, process_set = scales
        return tuple(synchronize(ops.grouped_allreduce_async(tensors, None, name, op, before, after, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *_Allreduce.apply(ctx.scales, None, *gradients)


class _Allgather(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        ctx.rows, ctx.process_set = [len(tensor) if tensor.ndim else 1 for tensor in tensors], process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(synchronize(moves.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        summed = synchronize(ops.grouped_allreduce_async(gradients, op=Average, process_set=ctx.process_set))
        counts = synchronize(moves.allgather_async(torch.tensor([ctx.rows]), process_set=ctx.process_set))
        place = ctx.process_set.rank()
        starts = counts[:place].sum(0).tolist()
        parts = [
            part[start : start + rows].reshape(shape)
            for part, start, rows, shape in zip(summed, starts, ctx.rows, ctx.shapes, strict=True)
        ]
        return None, None, *parts


class _Broadcast(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root, ctx.process_set = root, process_set
        return synchronize(moves.broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        handle = ops.allreduce_async(gradient, op=Average, process_set=ctx.process_set)
        summed = synchronize(handle)
        return summed if contexts.current().rank == ctx.root else summed * 0, None, None, None


class _Alltoall(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        size = process_set.size()
        counts = [len(tensor) // size] * size if splits is None else splits
        handle = moves.alltoall_async(tensor, splits, name, process_set)
        handle.finish = lambda result: result
        out, received = synchronize(handle)
        ctx.received, ctx.process_set, ctx.counts = received, process_set, counts
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        back, _received = synchronize(moves.alltoall_async(gradient, ctx.received, process_set=ctx.process_set))
        return back, None, None, None


class _Reducescatter(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, scales: tuple[Any, ...], name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.scales = scales
        op, before, after, process_set = scales
        return tuple(synchronize(moves.grouped_reducescatter_async(tensors, name, op, process_set, before, after)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, before, after, process_set = ctx.scales
        factor = before * after * (process_set.size() if op == Sum else 1)
        gathered = synchronize(moves.grouped_allgather_async(gradients, process_set=process_set))
        return None, None, *(part * factor for part in gathered)


def allreduce(
    tensor: torch.Tensor,
    average: Any = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the average over all ranks, or what `op` says. Raises HorovodInternalError where ranks differ in it."""
    sent, context = compression.compress(tensor)
    scales = (ops.reduction(average, op), prescale_factor, postscale_factor, process_set)
    (result,) = _Allreduce.apply(scales, name, sent)
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: Any = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the averages of several tensors, which are sent as one."""
    sent = [compression.compress(tensor) for tensor in tensors]
    scales = (ops.reduction(average, op), prescale_factor, postscale_factor, process_set)
    results = _Allreduce.apply(scales, name, *(tensor for tensor, _ in sent))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along their first dimension, which may differ."""
    (result,) = _Allgather.apply(name, process_set, tensor)
    return result  # type: ignore[no-any-return]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return several tensors of all ranks, each concatenated."""
    return list(_Allgather.apply(name, process_set, *tensors))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of `root_rank`."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return]


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows that came from all ranks; with `splits` also how many came from each."""
    out, received = _Alltoall.apply(tensor, splits, name, process_set)
    return out if splits is None else (out, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's part of the rows of the average, or sum, over all ranks."""
    sent, context = compression.compress(tensor)
    (result,) = _Reducescatter.apply((op, prescale_factor, postscale_factor, process_set), name, sent)
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's parts of several tensors."""
    sent = [compression.compress(tensor) for tensor in tensors]
    scales = (op, prescale_factor, postscale_factor, process_set)
    results = _Reducescatter.apply(scales, name, *(tensor for tensor, _ in sent))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)]
