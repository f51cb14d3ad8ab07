"""Spark ML estimators and models, a folder for each framework, and the same training without Spark (driver)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tritium.ml.extras import needed

if TYPE_CHECKING:
    from tritium.ml.callbacks import Callback, TrainState
    from tritium.ml.early_stopping import EarlyStopping
    from tritium.ml.torch.estimator import TorchEstimator
    from tritium.ml.torch.fit import fit
    from tritium.ml.torch.model import TorchModel
    from tritium.ml.torch.settings import TorchSettings

__all__ = ["Callback", "EarlyStopping", "TorchEstimator", "TorchModel", "TorchSettings", "TrainState", "fit"]

_HOME = {
    "Callback": "callbacks",
    "EarlyStopping": "early_stopping",
    "TorchEstimator": "torch.estimator",
    "TorchModel": "torch.model",
    "TorchSettings": "torch.settings",
    "TrainState": "callbacks",
    "fit": "torch.fit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tritium.ml' has no attribute {name!r}")
    with needed(f"tritium.ml.{name}"):
        value = getattr(importlib.import_module(f"tritium.ml.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
