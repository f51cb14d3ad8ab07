"""`tensorflowonspark.pipeline`: refused by name, with what takes its place (driver)."""

from __future__ import annotations

from typing import Any


class TFEstimator:
    """Refused: `tritium.ml.KerasEstimator` fits a Keras model on a DataFrame."""

    def __init__(self, train_fn: Any, tf_args: Any, export_fn: Any = None) -> None:
        raise NotImplementedError(
            "pipeline.TFEstimator: its function feeds itself from a running cluster. tritium.ml.KerasEstimator fits a "
            "Keras model on a DataFrame in a Pipeline, and FunctionEstimator a function of yours."
        )


class TFModel:
    """Refused: the model of `tritium.ml.KerasEstimator`, or `tritium.Model`, scores DataFrames and streams."""

    def __init__(self, tf_args: Any) -> None:
        raise NotImplementedError(
            "pipeline.TFModel: load the model with Keras, and score with tr.Model(model, example=batch).transformer()."
        )
