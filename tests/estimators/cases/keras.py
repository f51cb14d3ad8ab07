"""`KerasEstimator` on its torch back end: one dense layer."""

from __future__ import annotations

from typing import Any

PACKAGES = ("keras",)
RTOL = 1e-5


def make() -> Any:
    import keras

    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])


def estimator(**settings: Any) -> Any:
    from tritium.ml import KerasEstimator

    own = {"model": make, "backend": "torch", "loss": "mse", "optimizer": adam, "label_cols": ["y"], "epochs": 8}
    common = {"global_batch_size": 40, "shuffle": False, "checkpoint_every": 1}
    return KerasEstimator(**{**own, **common, **settings})


def adam() -> Any:
    import keras

    return keras.optimizers.Adam(0.2)


def classifier(classes: int, **settings: Any) -> Any:
    import keras

    def make() -> Any:
        return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(classes, activation="softmax")])

    return estimator(**{"model": make, "loss": "sparse_categorical_crossentropy", **settings})
