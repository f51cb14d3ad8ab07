"""Keras in a process of tests: on torch, whatever it is configured for, with its threads and variables made before."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any


def on_torch() -> Any:
    """Import Keras on torch, and return it."""
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    if before is None:
        del os.environ["KERAS_BACKEND"]
    else:
        os.environ["KERAS_BACKEND"] = before
    assert keras.backend.backend() == "torch"
    return keras


def settle() -> None:
    """Train a first model: for it TensorFlow is imported where it is there, and sets environment variables."""
    keras = on_torch()
    import h5py  # noqa: F401 - sets an environment variable

    if find_spec("tensorflow") is not None:
        import tensorflow  # noqa: F401 - sets several

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(keras.ops.zeros((2, 1)), keras.ops.zeros((2, 1)), verbose=0)
