"""Collectives that gather, broadcast, exchange or scatter torch tensors (rank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritium_compat.horovod import context
from tritium_compat.horovod.basics import Average, ProcessSet, Sum, global_process_set
from tritium_compat.horovod.torch.ops import Handle, dtype_name, reducing, submit, synchronize


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to concatenate the tensors of all ranks along their first dimension, which may differ."""
    return grouped_allgather_async([tensor], name, process_set, _first)


def _first(result: Sequence[Any]) -> Any:
    return result[0]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    finish: Callable[[Any], Any] = list,
) -> Handle:
    """Begin to concatenate several tensors."""
    given = [tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors]
    return submit("allgather", given, name, process_set, finish=finish)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to send the tensor of `root_rank` to all ranks; the tensor itself stays as it is."""
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    detail = {"root_rank": checked_root(root_rank, process_set)}
    return submit("broadcast", [tensor], name, process_set, outputs=[output], detail=detail)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to send the tensor of `root_rank` to all ranks, in place."""
    detail = {"root_rank": checked_root(root_rank, process_set)}
    return submit("broadcast", [tensor], name, process_set, outputs=[tensor], detail=detail, finish=lambda _: tensor)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Send the tensor of `root_rank` to all ranks, in place."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def checked_root(root_rank: int, process_set: ProcessSet) -> int:
    """Return the rank, if it is in the set. Raises ValueError."""
    ranks = process_set.ranks if process_set.process_set_id else range(context.current().size)
    if root_rank not in (ranks or ()):
        raise ValueError(f"root_rank={root_rank} is none of the ranks {list(ranks or ())}.")
    return int(root_rank)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to send parts of the tensor's rows to each rank.

    splits : how many rows go to each; None: equally many. With it, the result is a tuple of the rows that came, and how
        many came from each rank.
    """
    ranks = context.current().sets[process_set._number()]
    if tensor.ndim == 0:
        raise ValueError("alltoall needs a tensor with at least one dimension.")
    counts = _splits(splits, len(tensor), len(ranks))
    plain = splits is None
    return submit(
        "alltoall", [tensor], name, process_set, splits=counts, finish=lambda r: r[0] if plain else (r[0], r[1])
    )


def _splits(given: Any, rows: int, size: int) -> list[int]:
    if given is None or len(given) == 0:
        if rows % size:
            raise ValueError(f"alltoall of {rows} rows to {size} ranks: they do not divide evenly. Give splits=.")
        return [rows // size] * size
    splits = torch.as_tensor(given)
    if splits.is_floating_point() or splits.dtype == torch.bool:
        raise ValueError(f"splits has dtype {dtype_name(splits.dtype)}, and must be of integers.")
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"splits={counts} must have a number of rows for each of {size} ranks, of together at most {rows}."
        )
    return counts


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce over all ranks, and give each rank its part of the rows."""
    return grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor, _first)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    finish: Callable[[Any], Any] = list,
) -> Handle:
    """Begin to reduce and scatter several tensors."""
    if op not in (Average, Sum):
        raise NotImplementedError(f"reducescatter is there for hvd.Average and hvd.Sum, not for {op!r}.")
    if any(tensor.ndim == 0 for tensor in tensors):
        raise ValueError("reducescatter needs tensors with at least one dimension.")
    detail = reducing(op, prescale_factor, postscale_factor, process_set)
    return submit("reducescatter", list(tensors), name, process_set, detail=detail, finish=finish)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Any, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to sum or average a sparse tensor. Returns a function that waits for the result, and returns it."""
    given = tensor.coalesce()
    indices = allgather_async(given.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(given.values(), f"{name}.values", process_set)

    def wait() -> torch.Tensor:
        where, what = synchronize(indices).t(), synchronize(values)
        what = what / process_set.size() if op == Average else what
        return torch.sparse_coo_tensor(where, what, tensor.size(), check_invariants=False)

    return wait
