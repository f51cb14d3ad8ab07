"""Weights and optimizer state in checkpoints of sharded modules, by this or another number of ranks (rank)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tritium.ml.torch.ranks import Ranks


@dataclass(frozen=True)
class WholeShapes:
    """The shapes of the whole parameters, by which a part of a state is known to be sharded.

    A state is {"module": name → tensor, "optimizer": its state_dict, "best": name → tensor}.
    """

    named: Mapping[str, torch.Size]
    numbered: Sequence[torch.Size | None]
    """By the numbers of the optimizer's state; None for a parameter that is not the module's."""

    @classmethod
    def of(cls, module: torch.nn.Module, groups: Sequence[Sequence[str]]) -> WholeShapes:
        """Return those of a module, of whose parameters the optimizer has these groups."""
        named = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
        return cls(named, [named.get(name) for group in groups for name in group])

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return the whole state of the parts that all ranks saved; rank 0's of what each of them had whole."""

        def whole(values: Sequence[Any], shape: torch.Size | None) -> Any:
            first = values[0]
            if shape is None or not isinstance(first, torch.Tensor) or not 0 < first.ndim == len(shape):
                return first
            local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
            return torch.cat(local) if sum(map(len, local)) == shape[0] else first

        return self._mapped(whole, parts)

    def shared_out(self, state: Any, ranks: Ranks) -> Any:
        """Return a whole state with this rank's parts, as DTensors, of what has the shape of its parameter."""
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))

        def part(values: Sequence[Any], shape: torch.Size | None) -> Any:
            (value,) = values
            if shape is None or not isinstance(value, torch.Tensor) or not value.ndim or value.shape != shape:
                return value
            return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)

        return self._mapped(part, [state])

    def _mapped(self, change: Callable[[Sequence[Any], torch.Size | None], Any], states: Sequence[Any]) -> Any:
        """Return the first of these states, each value changed together with those at its place in the others."""

        def named(what: str) -> dict[str, Any]:
            return {k: change([state[what][k] for state in states], self.named.get(k)) for k in states[0][what]}

        optimizers = [state["optimizer"] for state in states]
        numbered = {
            number: {k: change([o["state"][number][k] for o in optimizers], self.numbered[number]) for k in values}
            for number, values in optimizers[0]["state"].items()
        }
        return {"module": named("module"), "best": named("best"), "optimizer": {**optimizers[0], "state": numbered}}
