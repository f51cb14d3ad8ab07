"""DDP averages gradients in memory that the ranks of one host share, in place of Gloo's TCP (rank)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tritium.frameworks.framework import Place
from tritium.frameworks.host_memory import HostMemory

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def host_memory(net: DistributedDataParallel) -> DistributedDataParallel:
    """Let a DDP average gradients in memory that ranks share, where the whole gang is on the CPUs of one host.

    Every rank of a launch with framework="torch" or "lightning" calls it, before the first `backward`. Elsewhere it
    changes nothing, so that the program also runs under torchrun. It registers the module's communication hook, of
    which torch allows one. Returns the same module.
    """
    memory = None if _current is None else _current.memory_for(net)
    if memory is not None:
        net.register_comm_hook(weakref.ref(net), _exchange(memory))
        net._comm_hooks.clear()  # What is there is pickled with the module, and memory can't be.
    return net


@contextmanager
def sharing(place: Place) -> Iterator[None]:
    """Let `host_memory` work in this block. A rank that leaves it ends the exchange of the others."""
    global _current
    _current = _Sharing(place)
    try:
        yield
    finally:
        _current.close()
        _current = None


class _Sharing:
    """The memory of the ranks, made for their first DDP."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._asked = False
        self._memory: HostMemory | None = None

    def close(self) -> None:
        """Leave the other ranks."""
        if self._memory is not None:
            self._memory.close()

    def memory_for(self, net: Any) -> HostMemory | None:
        """Return the memory, where the module's ranks are those that share it. All ranks call it with the same."""
        import torch.distributed as dist

        if self._place.size == 1 or self._place.device != "cpu":
            return None
        if net.process_group is not dist.group.WORLD or dist.get_world_size() != self._place.size:
            return None
        if any(parameter.device.type != "cpu" for parameter in net.parameters()):
            return None
        if not self._asked:
            self._asked, self._memory = True, HostMemory.shared(self._place)
        return self._memory


_current: _Sharing | None = None  # A process is one rank of one gang.


def _exchange(memory: HostMemory) -> Any:
    """Return the hook by which DDP averages a bucket."""

    def exchange(net: Any, bucket: Any) -> Any:
        import torch

        values = bucket.buffer()
        if net()._join_config.enable or values.layout != torch.strided or not memory.averages(values.dtype):
            return _through_the_group(net(), bucket)
        memory.mean([values.numpy()])
        done: Any = torch.futures.Future()
        done.set_result(values)
        return done

    exchange.__annotations__ = {}  # Torch refuses annotations that are texts.
    return exchange


def _through_the_group(net: Any, bucket: Any) -> Any:
    """Average a bucket through the process group, as DDP does by itself."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if net._join_config.enable and not net._divide_by_initial_world_size:
        # Ranks that have joined give zeros, outside a backward, and are not to count.
        still = torch.tensor(float(torch._C._current_graph_task_id() != -1))
        dist.all_reduce(still)
        bucket.buffer().mul_(dist.get_world_size() / float(still))
    return default_hooks.allreduce_hook(net.process_group, bucket)
