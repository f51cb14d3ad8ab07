"""The network of work.py in Keras, for the systems that train it."""

from __future__ import annotations

from typing import Any

import work


def make_model() -> Any:
    import keras

    layers = keras.layers
    hidden = [layers.Dense(256, "relu"), layers.Dense(256, "relu")]
    return keras.Sequential([layers.Input((work.WIDTH,)), *hidden, layers.Dense(1)])


def layers_of(model: Any) -> list[tuple[Any, Any]]:
    """The weights as `work.Fitted` has them."""
    return work.paired(model.get_weights())
