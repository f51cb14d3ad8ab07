"""DDP averages gradients in memory that the ranks of one host share, in place of Gloo's TCP (rank)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tritium.frameworks.at_import import at_import
from tritium.frameworks.framework import Place
from tritium.frameworks.host_memory import HostMemory

_MODULE = "torch.nn.parallel.distributed"


@contextmanager
def sharing(place: Place) -> Iterator[None]:
    """Let each DistributedDataParallel of these ranks exchange gradients in memory, where all are on one host's CPUs.

    A communication hook of the user's takes its place. A rank that leaves the block ends the exchange of the others.
    """
    if place.size == 1 or place.device != "cpu":
        yield
        return
    ranks = _Sharing(place)
    at_import(_MODULE, ranks.hook)
    try:
        yield
    finally:
        ranks.close()


class _Sharing:
    """The memory of the ranks, made with their first DDP, and what users have registered for theirs."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._asked = False
        self._memory: HostMemory | None = None
        self._users: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def hook(self, module: Any) -> None:
        """Register the exchange with each DDP when it is made, and keep it free for a hook of the user's."""
        kind = module.DistributedDataParallel
        init, register, builtin = kind.__init__, kind.register_comm_hook, kind._register_builtin_comm_hook

        @functools.wraps(init)
        def __init__(net: Any, *args: Any, **kwargs: Any) -> None:
            init(net, *args, **kwargs)
            if not net._comm_hooks and (memory := self._memory_for(net)) is not None:
                users: list[Any] = []
                register(net, weakref.ref(net), _exchange(memory, users))
                net._comm_hooks.clear()  # what is there is pickled with the module
                self._users[net] = users

        @functools.wraps(register)
        def register_comm_hook(net: Any, state: object, hook: Any) -> None:
            users = self._users.get(net)
            if users is None:
                register(net, state, hook)
                return
            net._check_comm_hook(hook)
            if users:
                raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
            users[:] = [state, hook]
            net._comm_hooks.append((hook, state))

        @functools.wraps(builtin)
        def _register_builtin_comm_hook(net: Any, which: Any) -> None:
            if net not in self._users:
                builtin(net, which)
                return
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hook = default_hooks.fp16_compress_hook if "FP16" in str(which) else default_hooks.allreduce_hook
            register_comm_hook(net, net.process_group, hook)

        kind.__init__, kind.register_comm_hook = __init__, register_comm_hook
        kind._register_builtin_comm_hook = _register_builtin_comm_hook

    def close(self) -> None:
        """Leave the other ranks."""
        if self._memory is not None:
            self._memory.close()

    def _memory_for(self, net: Any) -> HostMemory | None:
        """Return the memory, where the module's ranks are those that share it. All ranks call it with the same."""
        import torch.distributed as dist

        if net.process_group is not dist.group.WORLD or dist.get_world_size() != self._place.size:
            return None
        if any(parameter.device.type != "cpu" for parameter in net.parameters()):
            return None
        if not self._asked:
            self._asked, self._memory = True, HostMemory.shared(self._place)
        return self._memory


def _exchange(memory: HostMemory, users: list[Any]) -> Any:
    """Return the hook by which DDP averages a bucket, which calls that of `users`: state and hook, if there is one."""

    def exchange(net: Any, bucket: Any) -> Any:
        if users:
            state, hook = users
            return hook(state, bucket)
        import torch

        values = bucket.buffer()
        if net()._join_config.enable or values.layout != torch.strided or not memory.averages(values.dtype):
            return _through_the_group(net(), bucket)
        memory.mean([values.numpy()])
        done: Any = torch.futures.Future()
        done.set_result(values)
        return done

    exchange.__annotations__ = {}  # torch refuses annotations that are texts
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
