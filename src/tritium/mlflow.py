"""MLflow: runs of Tritium logged as its runs; models logged, loaded and served by `mlflow models serve` (driver)."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tritium import file_system
from tritium.events import Event, Logged, RunEnded, RunOpened
from tritium.model import registry
from tritium.model.model import Model, load
from tritium.model.table import kinds_of_columns
from tritium.observe.stream import listen
from tritium.observe.whole_steps import WholeSteps

__all__ = ["load_model", "log_model", "save_model", "tracked"]

_TYPES = {"string": "string", "binary": "binary", "timestamp": "datetime"}
_PACKAGES = {
    "torch": ("torch",),
    "keras": ("keras", "torch", "tensorflow", "jax"),
    "lightgbm": ("lightgbm",),
    "onnx": ("onnxruntime",),
    "function": (),
}
"""Engine → the packages that loading its models may import; those that are installed here are written down."""


@contextmanager
def tracked() -> Iterator[None]:
    """Log each run that is started within the block, of `tr.launch` or an estimator, as a run of MLflow.

        with tritium.mlflow.tracked():
            model = TorchEstimator(…).fit(df)

    Each is a child of the run that is active here, if there is one. Logged are parameters (an estimator's settings and
    the gang's), the numbers that rank 0 gives to `world.log` by step, the tags `tritium.run` and `tritium.run_dir`, and
    report.html. What MLflow raises does not end a run, and is said once. Raises WrongVersion without MLflow.
    """
    tracker = _Tracker(registry.library())
    with listen(tracker.on_event):
        yield


class _Tracker:
    """The callback of `tr.listen`. MLflow's active run is one of a thread, and each run's events come in a thread."""

    def __init__(self, mlflow: Any) -> None:
        self._mlflow = mlflow
        parent = mlflow.active_run()
        self._place = (
            {"parent_run_id": parent.info.run_id, "experiment_id": parent.info.experiment_id} if parent else {}
        )
        self._runs: dict[str, tuple[str, str]] = {}
        """Run → the id of MLflow's, and its directory."""
        self._steps = WholeSteps()

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunOpened):
            self._open(event)
        elif event.run not in self._runs:
            return
        elif isinstance(event, Logged) and event.rank == 0 and event.values:
            self._log(event, self._runs[event.run][0])
        elif isinstance(event, RunEnded):
            self._end(event, *self._runs.pop(event.run))

    def _open(self, event: RunOpened) -> None:
        settings = dict(event.settings)
        run_dir, title = str(settings.pop("run_dir")), settings.pop("title", "")
        settings |= settings.pop("training", {})
        tags = {"tritium.run": settings.pop("run_id"), "tritium.run_dir": run_dir}
        run = self._mlflow.start_run(run_name=title or event.run, tags=tags, **self._place)
        self._runs[event.run] = run.info.run_id, run_dir
        self._mlflow.log_params({name: value for name, value in settings.items() if value not in (None, "", [], {})})

    def _log(self, event: Logged, run_id: str) -> None:
        """Log numbers at their step of the whole training, or else at their epoch."""
        step = self._steps.step(event)
        numbers = {name: float(value) for name, value in (event.values or {}).items()}
        epoch = {} if event.epoch is None else {"epoch": float(event.epoch)}
        # Without waiting for the server: a training may log faster than that answers.
        self._mlflow.log_metrics(numbers | epoch, step=step, run_id=run_id, synchronous=False)

    def _end(self, event: RunEnded, run_id: str, run_dir: str) -> None:
        self._steps.forget(event.run)
        try:
            self._mlflow.flush_async_logging()
            page = file_system.read(f"{run_dir}/report.html").decode()
            self._mlflow.log_text(page, "report.html", run_id=run_id)
        finally:
            self._mlflow.end_run("FINISHED" if event.ok else "FAILED")


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
