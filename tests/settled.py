"""Keras and Lightning in a process of tests: what they do once in a process is done before a test counts it."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from typing import Any


def keras_on_torch() -> Any:
    """Import Keras on torch, whatever it is configured for, and return it."""
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    if before is None:
        del os.environ["KERAS_BACKEND"]
    else:
        os.environ["KERAS_BACKEND"] = before
    assert keras.backend.backend() == "torch"
    return keras


def settle_keras() -> None:
    """Train a first model, for which torch makes threads, and TensorFlow is imported where it is there."""
    keras = keras_on_torch()
    import h5py  # noqa: F401 - sets an environment variable

    if find_spec("tensorflow") is not None:
        import tensorflow  # noqa: F401 - sets several

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(keras.ops.zeros((2, 1)), keras.ops.zeros((2, 1)), verbose=0)


def settle_lightning() -> None:
    """Make a first Trainer, which opens sockets for good (for Gloo), where Lightning is installed."""
    if find_spec("lightning") is None:
        return
    import lightning

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a machine with a GPU: that it is not used
        lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet)
