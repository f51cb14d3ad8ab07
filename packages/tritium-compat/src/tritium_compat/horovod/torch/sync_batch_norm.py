"""`SyncBatchNorm`: batch normalization over the rows of all ranks (rank)."""

from __future__ import annotations

from typing import Any

import torch

from tritium_compat.horovod import context
from tritium_compat.horovod.basics import Sum
from tritium_compat.horovod.torch.autograd import allreduce


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Applies batch normalization over N-dimensional inputs, with mean and variance of the batches of all ranks."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input, of the same shape, (rows, channels, …)."""
        self._check_input_dim(input)
        if not (self.training or not self.track_running_stats) or context.current().size == 1:
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        count = input.new_tensor([input.numel() / input.size(1)])
        total = allreduce(torch.cat([input.sum(axes), (input * input).sum(axes), count]), op=Sum)
        rows, channels = total[-1], input.size(1)
        mean = total[:channels] / rows
        variance = total[channels:-1] / rows - mean * mean
        self._track(mean.detach(), variance.detach(), rows.detach())
        shape = [1, -1] + [1] * (input.dim() - 2)
        out = (input - mean.view(shape)) * torch.rsqrt(variance.clamp_min(0).view(shape) + self.eps)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, rows: torch.Tensor) -> None:
        if not self.track_running_stats:
            return
        counted: Any = self.num_batches_tracked
        counted.add_(1)
        factor = 1 / float(counted) if self.momentum is None else self.momentum
        averages: tuple[Any, Any] = (self.running_mean, self.running_var)
        averages[0].lerp_(mean, factor)
        averages[1].lerp_(variance * rows / (rows - 1).clamp_min(1), factor)
