"""The communication hook by which DDP exchanges a bucket of gradients, and the state of it (rank)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tritium.arguments import name_of
from tritium.errors import BadSetting
from tritium.frameworks.torch_memory import host_memory
from tritium.ml.torch.ddp_options import parts_of_hook

_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")  # bucket → tensor, of a PowerSGDState
_COUNTS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")


class CommHook:
    """A `comm_hook` of the settings; None: the mean over ranks, in memory where they are on one host."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._state: Any = None

    def register(self, net: DistributedDataParallel) -> None:
        """Let DDP exchange gradients by the hook. A state that is made here begins anew, as buckets may be others."""
        if self._given is None:
            host_memory(net)
            return
        state, call = _made(self._given)
        self._state = state

        def exchange(_: Any, bucket: Any) -> Any:
            future = call(state, bucket)
            if not hasattr(future, "then"):  # those of torch's own hooks are of a class that it does not export
                raise BadSetting(
                    f"ddp_options['comm_hook'], {name_of(call)}, returned a {type(future).__name__}, and must return "
                    "a torch.futures.Future of the bucket's exchanged gradients.",
                    setting="ddp_options",
                )
            return future

        # torch refuses annotations that are texts, and by its name the hook for bfloat16 where there is no NCCL
        exchange.__annotations__ = {}
        net.register_comm_hook(None, exchange)

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's state for a checkpoint; None for a hook without, or whose state can't be saved."""
        state = self._state
        if _is_power_sgd(state):
            kept = {name: getattr(state, name) for name in (*_MEMORIES, *_COUNTS) if hasattr(state, name)}
            return {**kept, "rng": state.rng.get_state()}
        return state.state_dict() if hasattr(state, "state_dict") else None

    def load_state_dict(self, kept: Mapping[str, Any] | None, device: torch.device) -> None:
        """Restore what `state_dict` returned. Called when DDP has its buckets."""
        state = self._state
        if kept is None or state is None:
            return
        if not _is_power_sgd(state):
            state.load_state_dict(kept)
            return
        for name in _COUNTS:
            if name in kept:
                setattr(state, name, kept[name])
        for name in _MEMORIES:
            setattr(state, name, {bucket: tensor.to(device) for bucket, tensor in kept[name].items()})
        state.rng.set_state(kept["rng"])


def _made(given: Any) -> tuple[Any, Any]:
    """Return state and function of a hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if given == "power_sgd":
        return powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook
    if isinstance(given, str):
        return None, {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[given]
    state, hook = parts_of_hook(given)
    return (state() if callable(state) else state), hook


def _is_power_sgd(state: Any) -> bool:
    return type(state).__name__ == "PowerSGDState"
