"""`TorchModel`: a trained PyTorch module as a Spark ML transformer (driver)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tritium.ml.model import TrainedModel

if TYPE_CHECKING:
    import torch


class TorchModel(TrainedModel):
    """A PyTorch module that adds its predictions to a DataFrame: Spark's, batch or streaming, or one of pandas.

    One number per row is a column `prediction` (double). A classification is `prediction` (the class index, double) and
    `probability` (an ml vector). Anything else is an array, several outputs a struct, in `prediction`.
    """

    def module(self) -> torch.nn.Module:
        """Return the PyTorch module itself, not a copy."""
        module: torch.nn.Module = self.model.module
        return module
