"""Keras on torch: plain `model.fit`."""

from __future__ import annotations

import functools

from frameworks.keras_model import train_on
from tritium.frameworks.keras import Keras

FRAMEWORK, ENV, PACKAGES = Keras(backend="torch"), {}, ("keras", "torch")  # type: ignore[var-annotated]
train = functools.partial(train_on, "torch")
