"""Spark ML estimators and models, one file a framework, and the same training without Spark (driver)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tritium.ml.extras import needed

if TYPE_CHECKING:
    from tritium.ml.callbacks import Callback, TrainState
    from tritium.ml.fitting import fit
    from tritium.ml.model import TorchModel
    from tritium.ml.settings import EarlyStopping, TorchSettings
    from tritium.ml.torch.estimator import TorchEstimator

__all__ = ["Callback", "EarlyStopping", "TorchEstimator", "TorchModel", "TorchSettings", "TrainState", "fit"]

_HOME = {
    "Callback": "callbacks",
    "EarlyStopping": "settings",
    "TorchEstimator": "torch.estimator",
    "TorchModel": "model",
    "TorchSettings": "settings",
    "TrainState": "callbacks",
    "fit": "fitting",
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
