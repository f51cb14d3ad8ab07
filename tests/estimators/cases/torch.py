"""`TorchEstimator`: a linear module."""

from __future__ import annotations

from typing import Any

PACKAGES = ("torch",)
GRID = ("epochs", [1, 8])
RTOL = 1e-5


def estimator(**settings: Any) -> Any:
    import torch
    from torch import nn

    from tritium.ml import TorchEstimator

    own = {"model": lambda: nn.Linear(2, 1), "loss": nn.MSELoss(), "optimizer": lambda p: torch.optim.Adam(p, 0.2)}
    common = {"label_cols": ["y"], "epochs": 8, "global_batch_size": 40, "shuffle": False, "checkpoint_every": 1}
    return TorchEstimator(**{**own, **common, **settings})


def classifier(classes: int, **settings: Any) -> Any:
    from torch import nn

    return estimator(**{"model": lambda: nn.Linear(2, classes), "loss": nn.CrossEntropyLoss(), **settings})
