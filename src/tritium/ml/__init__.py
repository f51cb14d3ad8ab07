"""Spark ML estimators and models, a folder for each framework, and the same training without Spark (driver)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tritium.ml.extras import needed

if TYPE_CHECKING:
    from tritium.ml.callbacks import Callback, TrainState
    from tritium.ml.early_stopping import EarlyStopping
    from tritium.ml.function.estimator import FunctionEstimator
    from tritium.ml.function.model import FunctionModel
    from tritium.ml.function.settings import FunctionSettings, Trained
    from tritium.ml.keras.estimator import KerasEstimator
    from tritium.ml.keras.model import KerasModel
    from tritium.ml.keras.settings import KerasSettings
    from tritium.ml.lightgbm.estimator import LightGBMClassifier, LightGBMRanker, LightGBMRegressor
    from tritium.ml.lightgbm.model import LightGBMModel
    from tritium.ml.lightning.estimator import LightningEstimator
    from tritium.ml.lightning.settings import LightningSettings
    from tritium.ml.onnx.model import ONNXModel
    from tritium.ml.torch.estimator import TorchEstimator
    from tritium.ml.torch.fit import fit
    from tritium.ml.torch.model import TorchModel
    from tritium.ml.torch.settings import TorchSettings

__all__ = [
    "Callback",
    "EarlyStopping",
    "FunctionEstimator",
    "FunctionModel",
    "FunctionSettings",
    "KerasEstimator",
    "KerasModel",
    "KerasSettings",
    "LightGBMClassifier",
    "LightGBMModel",
    "LightGBMRanker",
    "LightGBMRegressor",
    "LightningEstimator",
    "LightningSettings",
    "ONNXModel",
    "TorchEstimator",
    "TorchModel",
    "TorchSettings",
    "TrainState",
    "Trained",
    "fit",
]

_HOME = {
    "Callback": "callbacks",
    "EarlyStopping": "early_stopping",
    "FunctionEstimator": "function.estimator",
    "FunctionModel": "function.model",
    "FunctionSettings": "function.settings",
    "KerasEstimator": "keras.estimator",
    "KerasModel": "keras.model",
    "KerasSettings": "keras.settings",
    "LightGBMClassifier": "lightgbm.estimator",
    "LightGBMModel": "lightgbm.model",
    "LightGBMRanker": "lightgbm.estimator",
    "LightGBMRegressor": "lightgbm.estimator",
    "LightningEstimator": "lightning.estimator",
    "LightningSettings": "lightning.settings",
    "ONNXModel": "onnx.model",
    "TorchEstimator": "torch.estimator",
    "TorchModel": "torch.model",
    "TorchSettings": "torch.settings",
    "TrainState": "callbacks",
    "Trained": "function.settings",
    "fit": "torch.fit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tritium.ml' has no attribute {name!r}")
    with needed(f"tritium.ml.{name}"):
        try:
            value = getattr(importlib.import_module(f"tritium.ml.{_HOME[name]}"), name)
        except ModuleNotFoundError as error:
            value = importlib.import_module("tritium.package").left_on_the_driver(f"tritium.ml.{name}", error)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
