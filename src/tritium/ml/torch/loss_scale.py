"""The scaling of the loss in float16, in which small gradients would be zero (rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


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
        if skipped:  # a scheduler is stepped for it, too, and would warn that the optimizer never was
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
