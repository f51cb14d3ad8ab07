"""The optimizer of a training, and its step from batches to new weights (rank; the driver tries to make one)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tritium.arguments import argument_names, name_of, needed_arguments
from tritium.data.epochs import Group
from tritium.errors import BadSetting
from tritium.ml.torch.ddp import Replica
from tritium.ml.torch.divergence import DivergenceCheck
from tritium.ml.torch.epoch_metrics import EpochMetrics
from tritium.ml.torch.setting_checks import ONE_OPTIMIZER
from tritium.ml.torch.settings import TorchSettings
from tritium.ml.torch.step import Step

if TYPE_CHECKING:
    from tritium.ml.torch.fsdp import ShardedModule


def make_optimizer(settings: TorchSettings, module: torch.nn.Module) -> Any:
    """Return the optimizer of a module. Raises BadSetting when `optimizer` fails or returns something else."""
    optimizer = _call(settings.optimizer, module)
    kind = type(optimizer).__name__
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        several = f" {ONE_OPTIMIZER}" if isinstance(optimizer, Iterable) else ""
        raise BadSetting(
            f"optimizer={name_of(settings.optimizer)} returned a {kind}, and must return one torch.optim.Optimizer. A "
            f"scheduler goes into lr_scheduler=.{several}",
            setting="optimizer",
        )
    if needed := needed_arguments(optimizer.step):
        raise BadSetting(
            f"optimizer={name_of(settings.optimizer)} makes a {kind}, whose step can't be taken: its step needs "
            f"{', '.join(needed)}, and is called without after each batch. Take one that steps by the gradients alone, "
            "such as torch.optim.Adam.",
            setting="optimizer",
        )
    return optimizer


def _call(optimizer: Any, module: Any) -> Any:
    """Return what `optimizer` makes of the module's parameters, or of the module itself.

    It gets the module where its argument is called module or model, else the parameters. Where that fails it gets the
    other, so that `lambda m: Adam(m.parameters())` works, too: on every rank alike, as it depends on the function and
    the module alone. Where both fail the first error is raised, with the second as its context.
    """
    try:
        return optimizer(module if takes_module(optimizer) else module.parameters())
    except Exception as error:  # noqa: BLE001 - raised below
        try:
            return optimizer(module.parameters() if takes_module(optimizer) else module)
        except Exception:  # noqa: BLE001 - it is the context of the error
            raise error  # noqa: B904


def takes_module(optimizer: Any) -> bool:
    """Return whether `optimizer` takes the module, not its parameters, by the name of its argument."""
    return argument_names(optimizer)[:1] in (["module"], ["model"])


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
            del loss, output  # So that a batch's graph is released before the next one is computed.
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
            only_scaled = self.scaler.step(self._optimizer)
            self._divergence.watch(list(batches), losses, [] if only_scaled else norms)
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
        for parameter in self._ungrouped:  # The optimizer clears its own only, and the norm is that of all.
            parameter.grad = None


class LossScale:
    """torch's GradScaler, which leaves out a step whose gradients are not finite, and then scales by half as much.

    All ranks leave out the same steps, as the gradients that it looks at are the exchanged ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type)
        self.skipped = 0
        """Steps that were left out in this epoch."""

    @property
    def factor(self) -> float:
        """What the next loss is multiplied by."""
        return self._scaler.get_scale()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of which the gradients are computed."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer, ungrouped: Sequence[torch.nn.Parameter]) -> None:
        """Divide the exchanged gradients by the factor. `ungrouped`: parameters that the optimizer does not hold."""
        if _has_gradients(optimizer):
            self._scaler.unscale_(optimizer)
        for parameter in ungrouped:
            if parameter.grad is not None:
                parameter.grad.mul_(1 / self.factor)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the optimizer's step, if all gradients are finite. Return whether a smaller factor may make them so.

        Those that are not finite by a factor of 1 or less are not so because of the factor.
        """
        if not _has_gradients(optimizer):
            optimizer.step()
            return False
        before = self.factor
        self._scaler.step(optimizer)
        self._scaler.update()
        skipped = self.factor < before
        self.skipped += skipped
        if skipped:  # A scheduler is stepped for it, too, and would warn that the optimizer never was.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return skipped and before > 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"scaler": self._scaler.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"]


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
