"""The optimizer step of a training, from its batches to new weights (rank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tritium.data.epoch import Group
from tritium.ml.torch.ddp import Replica
from tritium.ml.torch.divergence import DivergenceCheck
from tritium.ml.torch.epoch_metrics import EpochMetrics
from tritium.ml.torch.loss_scale import LossScale
from tritium.ml.torch.settings import TorchSettings
from tritium.ml.torch.step import Step

if TYPE_CHECKING:
    from tritium.ml.torch.fsdp import ShardedModule


class OptimizerStep:
    """Forward and backward of the batches of a step, the exchange and clipping of gradients, and the step itself."""

    def __init__(
        self,
        settings: TorchSettings,
        replica: Replica | ShardedModule,
        optimizer: torch.optim.Optimizer,
        step: Step,
        divergence: DivergenceCheck,
    ) -> None:
        self._settings, self._replica, self._optimizer = settings, replica, optimizer
        self._step, self._divergence = step, divergence
        self._ungrouped: list[torch.nn.Parameter] = []
        self.scaler = LossScale(replica.device) if settings.precision == "fp16" else None
        """What scales the loss in float16; None in other precisions."""

    def on_epoch_start(self) -> None:
        """Set train mode, and look up what the optimizer holds, which a callback may have changed."""
        self._replica.train()
        self._ungrouped = self._replica.ungrouped(self._optimizer)

    def take(self, group: Group, metrics: EpochMetrics) -> torch.Tensor:
        """Take the step of these batches on every rank, add them to `metrics`, and return the loss of the last one."""
        losses = []
        for batch in group:
            loss, output = self._backward(batch, group)
            metrics.add(batch, loss, output)
            losses.append(loss)
            del loss, output  # a batch's graph is released before the next one is computed
        self._finish(group.taken, losses)
        return losses[-1]

    def _backward(self, batch: Any, group: Group) -> tuple[torch.Tensor, Any]:
        """Compute the gradients of a batch, over all ranks if it is the last one. Return its loss and its output."""
        with self._replica.gradients.exchanged(now=group.at_last):
            loss, output = self._replica.call(self._step, batch)
            # Scaled to give the mean over all rows of all ranks and batches, as one process would compute it.
            factor = batch.scale * batch.total / group.total
            whole = loss if factor == 1.0 else loss * factor
            (whole if self.scaler is None else self.scaler.scaled(whole)).backward()
        # A repeated row, of scale 0, must not count: its loss may be NaN, and NaN * 0 is NaN.
        return (loss.detach() if batch.rows else torch.zeros_like(loss.detach())), output

    def _finish(self, batches: Sequence[Any], losses: list[torch.Tensor]) -> None:
        """Watch, clip and take the gradients of these batches, and clear them."""
        if self.scaler is None:
            self._divergence.watch(list(batches), losses, self._replica.gradients.norms())
            self._clip()
            self._optimizer.step()
        else:
            self.scaler.unscale(self._optimizer, self._ungrouped)
            norms = self._replica.gradients.norms()
            self._clip()
            # Gradients that are infinite only as they were scaled are no divergence.
            gone = self.scaler.step(self._optimizer)
            self._divergence.watch(list(batches), losses, [] if gone else norms)
        self._clear()

    def entry(self, epoch: Any, tell: Callable[[str], Any]) -> dict[str, int]:
        """Return what the history's entry of an epoch has of its steps, and tell the user about those left out."""
        if self.scaler is None:
            return {}
        skipped, self.scaler.skipped = self.scaler.skipped, 0
        if skipped:
            tell(
                f"{skipped} of {-(-epoch.steps // self._settings.gradient_accumulation)} optimizer steps of epoch "
                f"{epoch.number + 1} were skipped, as a gradient was infinite in float16; the loss is now scaled by "
                f"{self.scaler.factor:g}"
            )
        return {"steps_skipped": skipped}

    def _clip(self) -> None:
        if self._settings.clip_grad_norm is not None:
            self._replica.gradients.clip(self._settings.clip_grad_norm)

    def _clear(self) -> None:
        self._optimizer.zero_grad()
        for parameter in self._ungrouped:  # the optimizer clears only its own, and the norm is that of all
            parameter.grad = None
