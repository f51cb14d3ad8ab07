"""`TorchModel`: a trained PyTorch module as a Spark ML transformer (driver)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters

from tritium.ml.model import TrainedModel
from tritium.model.calls import Computing
from tritium.model.model import Model

if TYPE_CHECKING:
    import torch


class TorchModel(TrainedModel):
    """A PyTorch module that adds its predictions to a DataFrame: Spark's, batch or streaming, or one of pandas.

    One number per row is a column `prediction` (double). A classification is `prediction` (the class index, double) and
    `probability` (an ml vector). Anything else is an array, several outputs a struct, in `prediction`.
    """

    precision: Param[Any] = Param(
        Params._dummy(),
        "precision",
        'how matrix products are computed: "fp32" in the dtype of the weights, "bf16" or "fp16" in bfloat16 or float16',
        TypeConverters.toString,
    )
    compile: Param[bool] = Param(
        Params._dummy(),
        "compile",
        "whether each worker compiles the module by torch.compile before its first call; it needs a C++ compiler there",
        TypeConverters.toBoolean,
    )

    def __init__(self, model: Model, *, output_cols: Sequence[str] | None = None, **params: Any) -> None:
        """Wrap a model. `params` are any of the parameters by name."""
        super().__init__(model, output_cols=output_cols)
        self._setDefault(precision="fp32", compile=False)
        self.setParams(**params)

    def _computing(self) -> Computing:
        return Computing(self.getOrDefault(self.precision), self.getOrDefault(self.compile))

    def module(self) -> torch.nn.Module:
        """Return the PyTorch module itself, not a copy."""
        module: torch.nn.Module = self.model.module
        return module
