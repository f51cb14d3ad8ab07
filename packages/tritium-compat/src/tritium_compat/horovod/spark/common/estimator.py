"""`HorovodEstimator` and `HorovodModel`: what the estimators and models of all frameworks share (driver)."""

from __future__ import annotations

import posixpath
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from pyspark.ml import Estimator, Model

from tritium import Data
from tritium.errors import BadSetting
from tritium_compat.horovod.spark.common.backend import SparkBackend
from tritium_compat.horovod.spark.common.columns import Metadata, check_columns, check_validation, metadata_of, split
from tritium_compat.horovod.spark.common.params import EstimatorParams, ModelParams
from tritium_compat.horovod.spark.common.reach import marked
from tritium_compat.horovod.spark.common.serialization import Saved
from tritium_compat.horovod.spark.common.training import Training
from tritium_compat.horovod.spark.common.util import prepare_data

_ON_THE_DRIVER = ("backend", "store", "model", "optimizer", "num_proc")  # not sent as they are


class HorovodEstimator(Estimator[Any], EstimatorParams, Saved):
    """An estimator with the parameters of `horovod.spark`."""

    kind: str
    """What connects the ranks."""
    prefix: str
    """What a run that has no name is called, before the time."""

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """Train on the Parquet files at `store.get_train_data_path(dataset_idx)`, and return the model."""
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        from pyspark.sql import SparkSession

        store, spark = self._checked_store(), SparkSession.builder.getOrCreate()
        frames = {"train": Data(spark.read.parquet(store.get_train_data_path(dataset_idx)))}
        if self._get("validation"):
            path = store.get_val_data_path(dataset_idx)
            if not store.exists(path):
                raise BadSetting(f"validation={self._get('validation')!r}, and there are no rows at {path}.")
            frames["validation"] = Data(spark.read.parquet(path))
        self._check(frames["train"].frame.columns)
        return self._train_on(frames, self._backend(), dataset_idx=dataset_idx)

    def _fit(self, dataset: Any) -> Any:
        self._checked_store()
        self._check(dataset.columns)
        backend, validation = self._backend(), self._get("validation")
        check_validation(validation, dataset)
        marks = [validation] if isinstance(validation, str) else []
        read = dataset.select(*dict.fromkeys([*self._columns(), *marks]))
        if isinstance(backend, SparkBackend):
            return self._train_on(split(read, validation, self._get("random_seed")), backend)
        with prepare_data(
            *(backend.num_processes(), self._get("store"), read, self._get("label_cols"), self._get("feature_cols")),
            validation=validation,
            sample_weight_col=self._get("sample_weight_col"),
        ) as number:
            return self._train_on({"train": Data(read)}, backend, dataset_idx=number)

    def _train_on(self, frames: Mapping[str, Data], backend: Any, dataset_idx: int | None = None) -> Any:
        """Train by the backend, from the run's checkpoint where there is one, and return the model."""
        store = self._get("store")
        run_id = self._get("run_id") or f"{self.prefix}_{int(time.time())}"
        metadata = metadata_of(frames["train"].frame.schema, self._columns())
        parquet = None
        if not isinstance(backend, SparkBackend):
            parquet = {"train": store.get_train_data_path(dataset_idx)}
            if self._get("validation"):
                parquet["validation"] = store.get_val_data_path(dataset_idx)
        with marked(store, run_id) as mark:
            training = self._training(frames, store, run_id, mark, parquet)
            results = backend.run(training, args=self._arguments(run_id, metadata), env=self._environment())
        return self._made(results[0], run_id, metadata)

    def _training(
        self,
        frames: Mapping[str, Data],
        store: Any,
        run_id: str,
        mark: str | None,
        parquet: Mapping[str, str] | None = None,
    ) -> Training:
        settings = {name: self._sent(name) for name in self.parameters if name not in _ON_THE_DRIVER}
        return Training(self._trainer(), self.kind, settings, self._columns(), frames, store, run_id, mark, parquet)

    # ---- what a framework adds

    @abstractmethod
    def _trainer(self) -> Any:
        """Return the function of a rank."""

    @abstractmethod
    def _arguments(self, run_id: str, metadata: Metadata) -> tuple[Any, ...]:
        """Return what the function gets beside its Rank."""

    @abstractmethod
    def _made(self, result: Any, run_id: str, metadata: Metadata) -> Any:
        """Return the transformer made from what rank 0 has returned."""

    def _environment(self) -> dict[str, str]:
        return {}

    def _sent(self, name: str) -> Any:
        """Return a parameter as it is sent to the ranks."""
        return self._get(name)

    def _checkpoint_name(self) -> str:
        return str(self._get("store").get_checkpoint_filename())

    def _check(self, there: list[str]) -> None:
        """Raise ValueError for parameters that are missing, or don't fit the columns that are there."""
        if self._get("model") is None:
            raise BadSetting("Model parameter is required", setting="model")
        if not self._get("label_cols") or not self._get("feature_cols"):
            raise BadSetting("feature_cols and label_cols are required", setting="feature_cols")
        check_validation(self._get("validation"))
        names = ("feature_cols", "label_cols", "sample_weight_col")
        check_columns(there, **{name: self._get(name) for name in names})
        shapes, labels = self._get("label_shapes"), self._get("label_cols")
        if shapes is not None and len(shapes) != len(labels):
            raise BadSetting(
                f"Label column count {len(labels)} must equal provided label shapes count {len(shapes)}",
                setting="label_shapes",
            )

    # ---- helpers

    def _get(self, name: str) -> Any:
        return self.getOrDefault(getattr(self, name))

    def _columns(self) -> list[str]:
        weight = self._get("sample_weight_col")
        return list(
            dict.fromkeys([*self._get("feature_cols"), *self._get("label_cols"), *([weight] if weight else [])])
        )

    def _checked_store(self) -> Any:
        store = self._get("store")
        if store is None:
            raise BadSetting("store is required: store=Store.create(path).", setting="store")
        return store

    def _backend(self) -> Any:
        backend, ranks = self._get("backend"), self._get("num_proc")
        if backend is None:
            return SparkBackend(ranks, verbose=self._get("verbose"))
        if ranks is not None:
            raise BadSetting('At most one of parameters "backend" and "num_proc" may be specified', setting="backend")
        return backend

    def _checkpoint(self, run_id: str) -> str | None:
        """Return the path of the run's checkpoint in the store; None where there is none."""
        store = self._get("store")
        below = store.get_checkpoint_path(run_id)
        if below is None:
            return None
        path = posixpath.join(below, self._checkpoint_name())
        return path if store.exists(path) else None


class HorovodModel(Model, ModelParams, Saved):
    """A trained model with the parameters of `horovod.spark`. `transform` adds `<label>__output` for each label."""

    def _get(self, name: str) -> Any:
        return self.getOrDefault(getattr(self, name))
