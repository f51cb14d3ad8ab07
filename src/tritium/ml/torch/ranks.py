"""The ranks of one training as torch.distributed sees them: one process group, ours from start to end (rank)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


class Ranks:
    """Collectives that every rank calls at the same places; with one rank they cost nothing."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.stepping: Callable[[torch.nn.Module], torch.nn.Module] = lambda module: module
        """Makes of a module what DDP shall wrap, whose forward computes all that gradients are taken of."""

    def replicate(self, module: torch.nn.Module, unused: bool) -> torch.nn.Module:
        """The module with rank 0's weights, whose gradients are averaged over ranks in `backward`.

        `unused`: some parameters get no gradient, and must not be waited for.
        """
        if self.size == 1 or not any(p.requires_grad for p in module.parameters()):
            return module
        return DistributedDataParallel(
            self.stepping(module), gradient_as_bucket_view=True, find_unused_parameters=unused
        )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum over ranks."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite these tensors with rank 0's: one exchange for all of them."""
        tensors = [t for t in tensors if t.layout == torch.strided and t.numel()]
        if self.size == 1 or not tensors:
            return
        with torch.no_grad():
            parts = [t.detach().contiguous().reshape(-1).view(torch.uint8).to(self.device) for t in tensors]
            whole = torch.cat(parts)
            dist.broadcast(whole, 0)
            for tensor, bits in zip(tensors, torch.split(whole, [len(part) for part in parts]), strict=True):
                # A copy, as a view of another type must begin at a multiple of its size.
                tensor.detach().copy_(bits.clone().view(tensor.dtype).view(tensor.shape))

    def same(self, text: str) -> bool:
        """Whether a text is the same on every rank, for 16 bytes."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        most, least = self.largest(torch.tensor([digest, ~digest], device=self.device)).tolist()
        return bool(most == ~least)

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item())

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank. Picklable."""
        held = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(held, value)
        return held


@contextmanager
def joined(world: Any) -> Iterator[Ranks]:
    """A process group over the gang (gloo, with nccl for GPUs), and a random state that is put back at the end."""
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
