"""Collectives of NumPy arrays, by which the fronts for TensorFlow and Keras do theirs (rank).

An array is lent to the engine as a torch tensor over the same memory, which is only read; results are new arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tritium_compat.horovod.basics import ProcessSet
from tritium_compat.horovod.torch import moves, ops

Array = Any
_UNSIGNED = {"uint16": np.int16, "uint32": np.int32, "uint64": np.int64}


class _Lent:
    """A view of an array that may be written, without which torch warns at every call."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _tensor(array: Array, moved: bool = True) -> torch.Tensor:
    """Return a tensor over the array's memory. moved : whether its values only move, and are not summed."""
    array = np.asarray(array)
    if not array.flags.c_contiguous:
        array = array.copy()
    name = array.dtype.name
    if name == "bfloat16":
        return _tensor(array.view(np.int16)).view(torch.bfloat16)
    if name in _UNSIGNED and moved:
        array = array.view(_UNSIGNED[name])
    elif name in _UNSIGNED or array.dtype.kind not in "fiub":
        raise ValueError(f"A collective of {name} is not supported. Convert the tensor before.")
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Lent(array)))


def _array(tensor: torch.Tensor, like: Array) -> Array:
    dtype = np.asarray(like).dtype
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().view(dtype)


def allreduce(
    arrays: Sequence[Array],
    name: str | None,
    op: str,
    before: float,
    after: float,
    process_set: ProcessSet,
) -> list[Array]:
    """Return the arrays reduced over all ranks, which are sent as one."""
    given = [_tensor(array, moved=False) for array in arrays]
    handle = ops.grouped_allreduce_async(given, None, name, op, before, after, process_set)
    return [_array(out, like) for out, like in zip(ops.synchronize(handle), arrays, strict=True)]


def allgather(arrays: Sequence[Array], name: str | None, process_set: ProcessSet) -> list[Array]:
    """Return the arrays of all ranks, each concatenated along its first dimension, which may differ."""
    handle = moves.grouped_allgather_async([_tensor(array) for array in arrays], name, process_set)
    return [_array(out, like) for out, like in zip(ops.synchronize(handle), arrays, strict=True)]


def broadcast(arrays: Sequence[Array], root_rank: int, name: str | None, process_set: ProcessSet) -> list[Array]:
    """Return the arrays of `root_rank`, which all ranks have of the same shapes and dtypes."""
    given = [_tensor(array) for array in arrays]
    outputs = [torch.empty_like(tensor) for tensor in given]
    detail = {"root_rank": moves.checked_root(root_rank, process_set)}
    handle = ops.submit("broadcast", given, name, process_set, outputs=outputs, detail=detail, finish=list)
    return [_array(out, like) for out, like in zip(ops.synchronize(handle), arrays, strict=True)]


def alltoall(array: Array, splits: Any, name: str | None, process_set: ProcessSet) -> tuple[Array, Array]:
    """Return the rows that came from all ranks, and how many came from each (int32)."""
    handle = moves.alltoall_async(_tensor(array), splits, name, process_set)
    handle.finish = lambda result: result
    rows, received = ops.synchronize(handle)
    return _array(rows, array), received.numpy()


def reducescatter(
    arrays: Sequence[Array],
    name: str | None,
    op: str,
    before: float,
    after: float,
    process_set: ProcessSet,
) -> list[Array]:
    """Return this rank's parts of the rows of the reduced arrays."""
    given = [_tensor(array, moved=False) for array in arrays]
    handle = moves.grouped_reducescatter_async(given, name, op, process_set, before, after)
    return [_array(out, like) for out, like in zip(ops.synchronize(handle), arrays, strict=True)]
