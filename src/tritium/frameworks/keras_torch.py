"""Keras on torch: averages gradients by torch.distributed, or in memory that the ranks of one host share (rank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any

from tritium.frameworks.framework import Place
from tritium.frameworks.host_memory import HostMemory


def run(place: Place, function: Callable[[TorchRanks], Any]) -> Any:
    """Call the function with the default process group made; torchrun's variables are set."""
    import torch
    import torch.distributed as dist

    on_gpu = place.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(place.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    memory = None if on_gpu else HostMemory.shared(place)
    with closing(memory) if memory is not None else nullcontext():
        result = function(TorchRanks(place.size, memory))
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


class TorchRanks:
    """The ranks of the default process group, and the memory that they share, if any."""

    def __init__(self, size: int, memory: HostMemory | None) -> None:
        self._size, self._memory = size, memory

    def check(self, model: Any) -> None:
        """Do nothing: every model can be trained."""

    def agree(self) -> None:
        """Do nothing: batches may differ in size."""

    def broadcast(self, values: Sequence[Any]) -> list[Any]:
        """Return rank 0's tensors."""
        import torch.distributed as dist

        return _by_dtype([value.detach() for value in values], lambda flat: dist.broadcast(flat, 0))

    def mean(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients, averaged over the ranks."""
        import torch.distributed as dist

        def reduce(flat: Any) -> None:
            dist.all_reduce(flat)
            flat /= self._size

        present = [gradient for gradient in gradients if gradient is not None]
        memory = self._memory
        if memory is not None and all(HostMemory.averages(one.dtype) and not one.is_sparse for one in present):
            means = iter(_in_memory(present, memory))
        else:
            means = iter(_by_dtype(present, reduce))
        return [None if gradient is None else next(means) for gradient in gradients]


def _in_memory(tensors: Sequence[Any], memory: HostMemory) -> list[Any]:
    """Return the means of the tensors, in new ones: two of those given may be one."""
    import torch

    means = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for dtype in dict.fromkeys(mean.dtype for mean in means):
        memory.mean([mean.numpy() for mean in means if mean.dtype == dtype])
    return means


def _by_dtype(tensors: Sequence[Any], collective: Callable[[Any], Any]) -> list[Any]:
    """Apply an in-place collective to all tensors, one call for each dtype and device; return new tensors."""
    import torch

    results: list[Any] = [None] * len(tensors)
    kinds: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    for numbers in kinds.values():
        flat = torch.cat([tensors[number].reshape(-1) for number in numbers])
        collective(flat)
        parts = torch.split(flat, [tensors[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            results[number] = part.view(tensors[number].shape)
    return results
