"""Models of Tritium in MLflow: logged, loaded, and served by `mlflow models serve` (any process)."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tritium.model import registry
from tritium.model.model import Model, load
from tritium.model.table import kinds_of_columns

__all__ = ["load_model", "log_model", "save_model"]

_TYPES = {"string": "string", "binary": "binary", "timestamp": "datetime"}
_PACKAGES = {
    "torch": ("torch",),
    "keras": ("keras", "torch", "tensorflow", "jax"),
    "lightgbm": ("lightgbm",),
    "onnx": ("onnxruntime",),
    "function": (),
}
"""Engine → the packages that loading its models may import; those that are installed here are written down."""


def save_model(model: Model, path: str, *, input_example: Any = None, **options: Any) -> None:
    """Write `model` as an MLflow model to the directory `path`, which must not exist.

    input_example : a pandas DataFrame of some rows, which MLflow keeps with the model, and predicts at once.
    options       : others of `mlflow.pyfunc.save_model`.
    """
    with _options(model, input_example, options) as arguments:
        registry.library().pyfunc.save_model(path, **arguments)


def log_model(model: Model, name: str = "model", *, input_example: Any = None, **options: Any) -> Any:
    """Log `model` to MLflow's current run, and return MLflow's ModelInfo.

    input_example : as for `save_model`. options : others of `mlflow.pyfunc.log_model`: registered_model_name="bikes".
    """
    with _options(model, input_example, options) as arguments:
        return registry.library().pyfunc.log_model(name=name, **arguments)


def load_model(uri: str) -> Model:
    """Return the Model at an MLflow URI ("models:/bikes/3", "runs:/…/model") or path, with `transform`.

    As with any model of MLflow, loading it runs its code. Raises ModelError where it is no model of Tritium.
    """
    with registry.downloaded(uri) as folder:
        return load(folder, trusted=True)


class _Predictor:
    """What `mlflow.pyfunc.load_model` calls."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return the predictions as columns of a pandas DataFrame: those of `Model.predict`, arrays as lists."""
        import pandas as pd  # type: ignore[import-untyped]

        predictions = self.model.predict(model_input, on_error=(params or {}).get("on_error", "fail"))
        columns = predictions if isinstance(predictions, dict) else {"prediction": predictions}
        index = model_input.index if len(model_input) == len(next(iter(columns.values()))) else None
        return pd.DataFrame({name: pd.Series(values.tolist(), index=index) for name, values in columns.items()})


def _load_pyfunc(path: str, model_config: Any = None) -> _Predictor:
    """Return the predictor of the model at `path`; MLflow calls it by this name."""
    return _Predictor(load(path, trusted=True))


@contextmanager
def _options(model: Model, input_example: Any, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of MLflow's own functions for a saved copy of the model."""
    registry.library()
    with tempfile.TemporaryDirectory(prefix="tritium-") as folder:
        model.save(os.path.join(folder, registry.FOLDER))
        yield {
            "loader_module": __name__,
            "data_path": os.path.join(folder, registry.FOLDER),
            "signature": _signature(model),
            "input_example": input_example,
            "pip_requirements": _requirements(model.engine.name),
            **options,
        }


def _signature(model: Model) -> Any:
    """Return the columns that the model takes, as MLflow knows them.

    Numbers are of any type, as for the model itself: of a double MLflow would refuse integers. The model checks them.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
    from mlflow.types.schema import AnyType

    columns = [
        ColSpec(DataType[_TYPES[kind]] if kind in _TYPES and depth == 0 else AnyType(), name)
        for name, (kind, depth) in kinds_of_columns(model.signature).items()
    ]
    on_error = ParamSpec("on_error", DataType.string, "fail")
    return ModelSignature(inputs=Schema(columns), params=ParamSchema([on_error]))


def _requirements(engine: str) -> list[str]:
    """Return what a server installs to load a model of this engine: the versions that are here."""
    versions = []
    for package in ("tritium", "pandas", *_PACKAGES[engine]):
        try:
            versions.append(f"{package}=={importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
