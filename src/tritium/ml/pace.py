"""What goes along with the steps: learning rate, early stopping, what is shown (rank)."""

from __future__ import annotations

import time
from typing import Any

import torch

from tritium.ml.settings import TorchSettings

_SHOW_SECONDS = 0.5


class Pace:
    """The learning rate scheduler, stepped after each epoch, or after each step if it was made for that."""

    def __init__(self, settings: TorchSettings, optimizer: torch.optim.Optimizer) -> None:
        self._settings, self._optimizer = settings, optimizer
        self._per_step = settings.scheduler_per_step()
        self._scheduler: Any = None
        self._restored: dict[str, Any] | None = None
        if settings.lr_scheduler is not None and not self._per_step:
            self._scheduler = settings.lr_scheduler(optimizer)

    def before_epoch(self, epoch: Any) -> None:
        """Makes a scheduler that counts steps, now that their number is known."""
        if self._per_step and self._scheduler is None:
            steps = -(-epoch.steps // self._settings.gradient_accumulation)
            options = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
            self._scheduler = self._settings.lr_scheduler(self._optimizer, steps * self._settings.epochs)
            if self._restored is not None:
                self._scheduler.load_state_dict(self._restored)
                for group, then in zip(self._optimizer.param_groups, options, strict=True):
                    group.update(then)  # a new scheduler begins with the first step's

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"scheduler": None if self._scheduler is None else self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as then; a scheduler that counts steps is yet to be made."""
        if self._scheduler is None:
            self._restored = state["scheduler"]
        elif state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])

    def after_step(self) -> None:
        """After each optimizer step."""
        if self._per_step and self._scheduler is not None:
            self._scheduler.step()

    def after_epoch(self, entry: dict[str, Any]) -> None:
        """After each epoch, with what it came to."""
        if self._scheduler is None or self._per_step:
            return
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(entry.get("validation_loss", entry["loss"]))
        else:
            self._scheduler.step()

    def learning_rate(self) -> float:
        """Of the first group of parameters."""
        return float(self._optimizer.param_groups[0]["lr"])


class Stopper:
    """Early stopping: what it sees is equal on every rank, and so is what it decides."""

    def __init__(self, settings: TorchSettings, module: torch.nn.Module) -> None:
        self._rule = settings.stopping()
        self._module = module
        self._monitor = "validation_loss" if settings.validation is not None else "loss"
        if self._rule is not None and self._rule.monitor is not None:
            self._monitor = self._rule.monitor
        self._best: float | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._waited = 0

    @property
    def enough(self) -> bool:
        """Whether training should stop."""
        return self._rule is not None and self._waited >= self._rule.patience

    def look_at(self, entry: dict[str, Any]) -> None:
        """An epoch's values."""
        if self._rule is None:
            return
        value = float(entry[self._monitor])
        if not self._rule.better(value, self._best):
            self._waited += 1
            return
        self._best, self._waited = value, 0
        if self._rule.restore_best:
            self._weights = {k: v.detach().cpu().clone() for k, v in self._module.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self._best, "waited": self._waited, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as then."""
        self._best, self._waited, self._weights = state["best"], state["waited"], state["weights"]

    def restore_best(self) -> None:
        """Gives the module the weights of its best epoch, if that is asked for."""
        if self._weights:
            self._module.load_state_dict(self._weights)


class Show:
    """Progress, at most twice a second while steps are taken, and once an epoch."""

    def __init__(self, settings: TorchSettings, world: Any) -> None:
        self._settings, self._world = settings, world
        self._rows = 0
        self._last = 0.0

    def step(self, epoch: Any, batches: list[Any], loss: torch.Tensor) -> None:
        """After an optimizer step over these batches."""
        self._rows += sum(batch.rows for batch in batches)
        now = time.monotonic()
        if self._settings.verbose and now - self._last >= _SHOW_SECONDS:
            self._last = now
            self._log(epoch=epoch.number, step=batches[-1].step, loss=loss)

    def epoch(self, entry: dict[str, Any]) -> None:
        """After an epoch, once for all ranks."""
        if self._settings.verbose and self._world.rank == 0:
            shown = {k: v for k, v in entry.items() if isinstance(v, float) and k not in ("seconds", "rows_per_second")}
            self._log(epoch=entry["epoch"], **shown)

    def _log(self, **values: Any) -> None:
        self._world.log(epochs=self._settings.epochs, **(values | {"rows": self._rows}))
