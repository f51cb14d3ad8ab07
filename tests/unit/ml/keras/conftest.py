"""Keras of the tests runs on torch, whatever it is configured for; its threads are made before a test counts them."""

from __future__ import annotations

import os

import pytest

_before = os.environ.get("KERAS_BACKEND")
os.environ["KERAS_BACKEND"] = "torch"
import keras  # noqa: E402 - it reads the variable

if _before is None:
    del os.environ["KERAS_BACKEND"]
else:
    os.environ["KERAS_BACKEND"] = _before


@pytest.fixture(scope="session", autouse=True)
def _keras_settled() -> None:
    """Train a first model, for which Keras imports TensorFlow where it is there, and torch makes threads."""
    assert keras.backend.backend() == "torch"
    import h5py  # noqa: F401 - sets an environment variable
    import tensorflow  # noqa: F401 - sets several

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(keras.ops.zeros((2, 1)), keras.ops.zeros((2, 1)), verbose=0)
