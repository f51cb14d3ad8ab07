"""The step of a training with several optimizers: one after another over the same batch (rank)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from tritium.data.epoch import Group
from tritium.ml.torch.comm_hook import CommHook
from tritium.ml.torch.ddp import Ranks, Replica, copy_of_weights
from tritium.ml.torch.divergence import DivergenceCheck
from tritium.ml.torch.epoch_metrics import EpochMetrics
from tritium.ml.torch.optimizer_step import OptimizerStep
from tritium.ml.torch.optimizers import Optimizers
from tritium.ml.torch.settings import TorchSettings
from tritium.ml.torch.step import OwnStep, make_step


class Replicas:
    """A `Replica` for each optimizer, whose DDP exchanges the gradients of that optimizer's parameters alone."""

    sharded: Literal[False] = False

    def __init__(self, settings: TorchSettings, ranks: Ranks, module: torch.nn.Module, optimizers: Optimizers) -> None:
        self.module, self._optimizers = module, optimizers
        self.comm_hook = CommHook(None)  # a hook is refused with several optimizers
        self.each: dict[str, Replica] = {}
        for name in optimizers:
            own = settings.for_optimizer(name)
            with optimizers.alone(name):
                stepping = lambda module, own=own: OwnStep(module, own)  # noqa: E731
                # What one step leaves out shows nothing of the next.
                self.each[name] = Replica(module, ranks, True, settings.ddp_options, stepping=stepping)

    @property
    def trainable(self) -> list[str]:
        """The names of the parameters that require a gradient."""
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    @property
    def order(self) -> dict[str, list[str] | None]:
        """The order of the buckets of each, for a checkpoint."""
        return {name: replica.order for name, replica in self.each.items()}

    def restore(self, order: Mapping[str, Sequence[str] | None]) -> None:
        """Continue with the buckets of a training that had this order. A collective call."""
        for name, replica in self.each.items():
            with self._optimizers.alone(name):
                replica.restore(order[name])

    def copy_of_weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights and buffers on the CPU."""
        return copy_of_weights(self.module)

    def train(self) -> None:
        """Set train mode."""
        for replica in self.each.values():
            replica.train()

    def train_only(self, names: Sequence[str]) -> None:
        """Freeze all parameters but these. Call `refresh` afterwards."""
        next(iter(self.each.values())).train_only(names)

    def refresh(self, _: Any) -> None:
        """Exchange the gradients of what is trainable now. A collective call."""
        for name, replica in self.each.items():
            with self._optimizers.alone(name):
                replica.refresh(self._optimizers[name])


class SeveralSteps:
    """For each optimizer in turn: its loss of the batch, the gradients of its own parameters, and its step."""

    scaler = None  # float16 is refused with several optimizers

    def __init__(
        self, settings: TorchSettings, replicas: Replicas, optimizers: Optimizers, divergence: DivergenceCheck
    ) -> None:
        self._replicas, self._optimizers = replicas, optimizers
        self.losses = [f"{name}_loss" for name in optimizers]
        """Names of the losses in the history, beside their sum."""
        self._steps = {
            name: OptimizerStep(
                *(settings, replica, optimizers[name]),
                *(make_step(settings.for_optimizer(name), replica.device), divergence),
            )
            for name, replica in replicas.each.items()
        }

    def on_epoch_start(self) -> None:
        """Set train mode, and look up what the optimizers hold, which a callback may have changed."""
        for step in self._steps.values():
            step.on_epoch_start()

    def take(self, group: Group, metrics: EpochMetrics) -> torch.Tensor:
        """Take a step of each optimizer on every rank, and return the sum of their losses of the batch."""
        total = None
        for batch in group:
            losses = []
            for name, step in self._steps.items():
                with self._optimizers.alone(name):
                    loss, _ = step.backward(batch, group)
                    step.finish([batch], [loss])
                losses.append(loss)
            total = torch.stack(losses).sum()
            metrics.add(batch, total, None, losses)
        assert total is not None
        return total

    def entry(self, epoch: Any, tell: Callable[[str], Any]) -> dict[str, int]:
        """Return what the history's entry of an epoch has of its steps: nothing."""
        del epoch, tell
        return {}


def validating_step(settings: TorchSettings, optimizers: Optimizers, device: torch.device) -> Callable[..., Any]:
    """Return the function (module, batch) -> (sum of the losses, None, losses) for validation."""
    steps = [make_step(settings.for_optimizer(name), device) for name in optimizers]

    def step(module: Any, batch: Any) -> tuple[torch.Tensor, None, list[torch.Tensor]]:
        losses = [one(module, batch)[0] for one in steps]
        return torch.stack(losses).sum(), None, losses

    return step
