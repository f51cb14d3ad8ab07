"""Sending models, optimizers and objects from one rank to all, and objects from all to all (rank)."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tritium.integration import pickle_from_rank
from tritium_compat.horovod import context
from tritium_compat.horovod.basics import ProcessSet, global_process_set
from tritium_compat.horovod.torch import moves, ops


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Give all ranks the tensors of `root_rank`, in place.

    params : a state_dict, `named_parameters()`, or tensors. What is no tensor, in a state_dict, is left out.
    """
    named: Iterable[Any]
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor):
        named = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    start = prefix or ""
    handles = [
        moves.broadcast_async_(tensor.data, root_rank, None if name is None else f"{start}{name}")
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        ops.synchronize(handle)


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Give all ranks the state of the optimizer of `root_rank`: its tensors, and options such as the learning rate."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    mine = context.current().rank == root_rank
    state = broadcast_object(_saved(optimizer) if mine else None, root_rank, "optimizer state")
    if not mine:
        loaded = torch.load(io.BytesIO(state), map_location="cpu", weights_only=False)
        optimizer.load_state_dict(loaded)


def _saved(optimizer: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of `root_rank`, which cloudpickle can copy."""
    mine = context.current().rank == root_rank
    payload = pickle_from_rank(obj) if mine else b""
    size = torch.tensor([len(payload)])
    name = name or "object"
    moves.broadcast_(size, root_rank, f"{name}.size", process_set)
    content = torch.zeros(int(size), dtype=torch.uint8)
    if mine:
        content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    moves.broadcast_(content, root_rank, f"{name}.bytes", process_set)
    return obj if mine else pickle.loads(content.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, which cloudpickle can copy."""
    name = name or "object"
    payload = torch.frombuffer(bytearray(pickle_from_rank(obj)), dtype=torch.uint8)
    sizes = ops.synchronize(moves.allgather_async(torch.tensor([len(payload)]), f"{name}.sizes", process_set)).tolist()
    content = ops.synchronize(moves.allgather_async(payload, f"{name}.bytes", process_set)).numpy().tobytes()
    found, start = [], 0
    for size in sizes:
        found.append(pickle.loads(content[start : start + size]))
        start += size
    return found
