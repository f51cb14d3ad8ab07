"""`TorchState`: models, optimizers, samplers and plain values that are committed (rank)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from tritium_compat.horovod.basics import rank
from tritium_compat.horovod.elastic import ObjectState
from tritium_compat.horovod.torch.elastic.sampler import ElasticSampler
from tritium_compat.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class TorchState(ObjectState):
    """A model, an optimizer, and whatever else a training continues from, each an attribute by its name."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        """Make a state: what `state_dict` says of models, optimizers, schedulers and samplers, and other values."""
        given = {"model": model, "optimizer": optimizer, **kwargs}
        parts = {name: one for name, one in given.items() if isinstance(one, _PARTS)}
        self._parts: dict[str, Any] = {}
        super().__init__(broadcast_object, rank, **{name: one for name, one in given.items() if name not in parts})
        self._saved: dict[str, Any] = {}
        for name, part in parts.items():
            setattr(self, name, part)
            self._parts[name] = part
            self._saved[name] = copy.deepcopy(part.state_dict())

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; another model, optimizer or sampler in the place of one is saved at once."""
        super().__setattr__(name, value)
        if name in self.__dict__.get("_parts", ()):
            self._parts[name] = value
            self._saved[name] = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Save all in memory."""
        for name, part in self._parts.items():
            self._saved[name] = copy.deepcopy(part.state_dict())
        super().save()

    def restore(self) -> None:
        """Go back to what was last saved."""
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._saved[name]))
        super().restore()

    def sync(self) -> None:
        """Take rank 0's state, and save it."""
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict(), root_rank=0)
            elif isinstance(part, torch.optim.Optimizer):
                broadcast_optimizer_state(part, root_rank=0)
            else:
                part.load_state_dict(broadcast_object(part.state_dict()))
        super().sync()
        self.save()

    def kept(self) -> Mapping[str, Any]:
        """Return what was last saved."""
        return {"values": self._saved_state, "parts": self._saved}

    def take_kept(self, kept: Mapping[str, Any]) -> None:
        """Take what `kept` returned as what was last saved."""
        super().take_kept(kept)
        self._saved |= {name: one for name, one in kept["parts"].items() if name in self._parts}


_PARTS = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, ElasticSampler)

__all__ = ["TorchState"]
