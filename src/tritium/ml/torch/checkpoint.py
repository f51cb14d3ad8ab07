"""What a checkpoint keeps of a training with PyTorch: weights, whole or sharded, and states of callbacks (rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tritium.ml.callbacks import TrainState, keeps_state
from tritium.ml.early_stopping import EarlyStoppingState
from tritium.ml.torch.ddp import Replica
from tritium.ml.torch.divergence import DivergenceCheck
from tritium.ml.torch.fsdp import WholeShapes
from tritium.ml.torch.ranks import Ranks

if TYPE_CHECKING:
    from tritium.ml.torch.fsdp import ShardedModule


class TorchWeights:
    """The weights of the module, now and of its best epoch, the optimizer's state, and what of the module is trained.

    They are equal on every rank, or each rank has its part of them.
    """

    def __init__(
        self,
        state: TrainState,
        replica: Replica | ShardedModule,
        ranks: Ranks,
        early_stopping: EarlyStoppingState,
        divergence: DivergenceCheck,
    ) -> None:
        self._state, self._replica, self._ranks = state, replica, ranks
        self._early_stopping, self._divergence = early_stopping, divergence
        self._sharded = replica.sharded

    def shared(self) -> dict[str, Any]:
        self._divergence.check()  # A training that has diverged must not be saved.
        return {
            "weights": None if self._sharded else self._all(),
            "groups": self._groups(),
            "trainable": self._replica.trainable,
            "gradients": self._replica.order,
        }

    def own(self) -> dict[str, Any] | None:
        return self._all() if self._sharded else None

    def restore_module(self, shared: Any, own: Sequence[Any]) -> None:
        """Restore the module alone, for the callbacks' `on_train_start`, which may change it."""
        self._state.module.load_state_dict(self._restored(shared, own)["module"])

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        """Restore all that was saved. A collective call.

        Must be called after `on_train_start`, in which callbacks repeat what they did when the training began: freeze
        layers, add groups to the optimizer, draw random numbers. The checkpoint has the later state of these.
        """
        module, optimizer = self._state.module, self._state.optimizer
        self._restore_groups(shared["groups"])
        self._replica.train_only(shared["trainable"])
        self._replica.refresh(optimizer)
        self._replica.restore(shared["gradients"])
        weights = self._restored(shared, own)
        module.load_state_dict(weights["module"])
        optimizer.load_state_dict(weights["optimizer"])
        self._early_stopping.load_weights(weights["best"])

    def _restored(self, shared: Any, parts: Sequence[Any]) -> Mapping[str, Any]:
        """Return weights, optimizer state and best weights as this rank holds them: all of them, or a part.

        They may have been saved by another number of ranks, each with a part, or by one with all of them.
        """
        were_sharded = parts[0] is not None
        if self._sharded and were_sharded and len(parts) == self._ranks.size:
            return parts[self._ranks.rank]  # type: ignore[no-any-return]
        if not were_sharded and not self._sharded:
            return shared["weights"]  # type: ignore[no-any-return]
        shapes = WholeShapes.of(self._state.module, shared["groups"])
        whole = shapes.joined(parts) if were_sharded else shared["weights"]
        return shapes.shared_out(whole, self._ranks) if self._sharded else whole  # type: ignore[no-any-return]

    def _restore_groups(self, groups: Sequence[Sequence[str]]) -> None:
        """Add the groups that a callback had added to the optimizer after an epoch."""
        named = dict(self._state.module.named_parameters())
        for names in groups[len(self._state.optimizer.param_groups) :]:
            if all(name in named for name in names):
                self._state.optimizer.add_param_group({"params": [named[name] for name in names]})

    def _groups(self) -> list[list[str]]:
        """Return the parameters' names in each group of the optimizer; "" for one that is not the module's."""
        names = {id(parameter): name for name, parameter in self._state.module.named_parameters()}
        return [[names.get(id(p), "") for p in group["params"]] for group in self._state.optimizer.param_groups]

    def _all(self) -> dict[str, Any]:
        """Return weights, optimizer state and the best weights so far: all of them, or this rank's part."""
        return {
            "module": dict(self._state.module.state_dict()),
            "optimizer": self._state.optimizer.state_dict(),
            "best": self._early_stopping.weights,
        }


def buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a module's state holds beside its parameters, such as BatchNorm's running means."""
    kept = {name for name, _ in module.named_buffers()}
    return {name: value for name, value in module.state_dict().items() if name in kept}


def states_of(callbacks: Sequence[Any]) -> list[Any]:
    """Return the states of callbacks; None for one that keeps none."""
    return [callback.state_dict() if keeps_state(callback) else None for callback in callbacks]


def restore_states(callbacks: Sequence[Any], states: Sequence[Any]) -> None:
    """Restore what `states_of` returned."""
    for callback, state in zip(callbacks, states, strict=False):
        if state is not None:
            callback.load_state_dict(state)
