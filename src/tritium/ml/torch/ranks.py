"""The ranks of a training: their collectives, and the check that they hold the same weights (rank)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tritium.errors import RanksDiffer

T = TypeVar("T")


class Ranks:
    """Collectives, which every rank must call at the same places; with one rank they cost nothing."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite these tensors with rank 0's, in one broadcast for all of them."""
        tensors = [t for t in tensors if t.layout == torch.strided and t.numel()]
        if self.size == 1 or not tensors:
            return
        with torch.no_grad():
            parts = [t.detach().contiguous().reshape(-1).view(torch.uint8).to(self.device) for t in tensors]
            whole = torch.cat(parts)
            dist.broadcast(whole, 0)
            for tensor, bits in zip(tensors, torch.split(whole, [len(part) for part in parts]), strict=True):
                # A copy, as a view of another type must begin at a multiple of that type's size.
                tensor.detach().copy_(bits.clone().view(tensor.dtype).view(tensor.shape))

    def same(self, text: str) -> bool:
        """Return whether a text is the same on every rank. Exchanges 16 bytes."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        greatest, least = self.largest(torch.tensor([digest, ~digest], device=self.device)).tolist()
        return bool(greatest == ~least)  # The greatest ~digest is that of the least digest.

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item())

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank. A value must be picklable."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


@contextmanager
def joined(world: Any) -> Iterator[Ranks]:
    """Join a process group over the gang (gloo, with nccl for GPUs), and restore the random state at the end."""
    device = torch.device(world.device)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        if gpus:
            torch.cuda.set_device(device)
        if world.size > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
        try:
            yield Ranks(world.rank, world.size, device)
        finally:
            if world.size > 1:
                dist.destroy_process_group()


def copy_of_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the module's weights and buffers on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


# ---- the same weights on all ranks


def take_buffers(module: torch.nn.Module, ranks: Ranks) -> None:
    """Give every rank the buffers of rank 0. A collective call.

    A buffer that is not persistent may have another shape on each rank, e.g. if it holds the last batch. It is replaced
    by rank 0's, as DDP broadcasts buffers too and needs equal shapes. Raises RanksDiffer for a persistent one.
    """
    if ranks.size == 1:
        return
    buffers = dict(module.named_buffers())
    shapes, names = _of_other_shapes(buffers, ranks)
    if names:
        _refuse_other_shapes([name for name in names if name in module.state_dict()], shapes, ranks, "buffer ")
        of_first = {name: buffers[name].cpu() for name in names if name in buffers and ranks.rank == 0}
        for name, value in ranks.gather(of_first)[0].items():
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_buffer(last, value.to(ranks.device), persistent=False)
    ranks.from_first(value for name, value in buffers.items() if name not in names)


def _of_other_shapes(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> tuple[list[dict[str, str]], list[str]]:
    """Return shape and type by name on each rank, and the names for which they differ.

    A collective call, of 16 bytes if none differs. It is needed because a collective over tensors whose sizes differ
    between ranks ends the process with SIGABRT.
    """
    shapes = {name: f"{value.dtype} {list(value.shape)}".removeprefix("torch.") for name, value in tensors.items()}
    if ranks.same(repr(sorted(shapes.items()))):
        return [], []
    by_rank = ranks.gather(shapes)
    names = {name for shapes in by_rank for name in shapes}
    return by_rank, sorted(name for name in names if len({shapes.get(name) for shapes in by_rank}) > 1)


def _refuse_other_shapes(names: list[str], by_rank: list[dict[str, str]], ranks: Ranks, kind: str = "") -> None:
    """Raise RanksDiffer for the first of these tensors of any rank, which need not exist on all. A collective call."""
    names = sorted({name for of_rank in ranks.gather(names) for name in of_rank})
    if not names:
        return
    name, of_first = names[0], by_rank[0].get(names[0])
    others = [rank for rank, shapes in enumerate(by_rank) if shapes.get(name) != of_first]
    of_other = by_rank[others[0]].get(name)
    if of_first is None:
        difference = f"{kind}{name!r} is none of rank 0's, and {of_other} on {_ranks(others)}"
    else:
        difference = f"{kind}{name!r} is {of_first} on rank 0, and {of_other or 'not there'} on {_ranks(others)}"
    raise RanksDiffer(
        f"The tensors of the model differ between ranks, so that there is no model: {difference} ({len(names)} tensors "
        "in all). A layer or buffer that a callback or forward adds or replaces must be the same on every rank; what "
        "is of one batch alone is no part of the model: register_buffer(…, persistent=False), or a plain attribute.",
        ranks=others,
        tensor=name,
    )


def refuse_different(module: torch.nn.Module, ranks: Ranks) -> None:
    """Raise RanksDiffer, on every rank, where the bits of a weight or buffer differ between ranks. A collective call.

    Sharded weights are left out, of which no two ranks hold the same part. It reads the weights once, and exchanges 16
    bytes per tensor; more only where something differs.
    """
    if ranks.size == 1:
        return
    tensors = {
        name: value
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if value.layout == torch.strided and value.numel()
    }
    shapes, names = _of_other_shapes(tensors, ranks)
    if names:
        _refuse_other_shapes(names, shapes, ranks)
    if not tensors:
        return
    sums = torch.stack([checksum(value).to(ranks.device) for value in tensors.values()])
    # The operator ~ reverses the order, so that the maximum of ~sums gives the minimum.
    largest = ranks.largest(torch.cat([sums, ~sums]))
    if torch.equal(largest[: len(sums)], ~largest[len(sums) :]):
        return
    sums_by_rank = ranks.gather(sums.tolist())
    differ = [i for i in range(len(sums)) if len({sums[i] for sums in sums_by_rank}) > 1]
    name, by_value = list(tensors)[differ[0]], dict[int, list[int]]()
    for rank, values in enumerate(sums_by_rank):
        by_value.setdefault(values[differ[0]], []).append(rank)
    most, *others = sorted(by_value.values(), key=len, reverse=True)
    wrong_ranks = sorted(rank for group in others for rank in group)
    raise RanksDiffer(
        f"The weights differ between ranks, so that there is no model: {name!r} is the same on {_ranks(most)}, and "
        f"another on {_ranks(wrong_ranks)} ({len(differ)} of {len(tensors)} tensors differ). What changes weights or "
        "optimizer outside the training step must do the same on every rank: look at callbacks, at random numbers in "
        "them, and at what train_step changes by itself. Where ranks compute on different kinds of processors, which "
        "round differently, equal_weights=False takes rank 0's weights.",
        ranks=wrong_ranks,
        tensor=name,
    )


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum over the tensor's bits, int64."""
    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    bits = value.contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:  # It is a view of a larger tensor.
        bits = bits.clone()
    whole = len(bits) // 8 * 8  # Sums of int32 would be summed at a twentieth of the speed of int64.
    return bits[:whole].view(torch.int64).sum() + bits[whole:].sum(dtype=torch.int64)


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
