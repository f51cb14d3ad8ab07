"""Metrics of one's own. Import torchmetrics, and this, in a function: it takes 3.6 s in each process that collects."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics


class Worst(torchmetrics.Metric):
    """The largest error, as a metric that keeps all rows, like those that need them all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("outputs", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.outputs.append(output.detach())
        self.labels.append(label.double())

    def compute(self) -> torch.Tensor:
        def whole(kept: Any) -> torch.Tensor:
            return torch.cat(kept) if isinstance(kept, list) else kept

        return (whole(self.outputs) - whole(self.labels)).abs().max()


class Stacked(torchmetrics.Metric):
    """The mean squared error, as a metric that gets the states of all ranks side by side, like PearsonCorrCoef."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2), dist_reduce_fx=None)

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        squares = (output - label).square().detach()
        self.sums = self.sums + torch.stack([squares.sum(), torch.tensor(float(len(squares)))])

    def compute(self) -> torch.Tensor:
        total, rows = self.sums.reshape(-1, 2).sum(0)
        return total / rows


class Halves(torchmetrics.Metric):
    """A metric that others of its own are kept in."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = torchmetrics.SumMetric()

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.upper.update(output[label > 0])

    def compute(self) -> torch.Tensor:
        return self.upper.compute()
