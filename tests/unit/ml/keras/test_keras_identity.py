"""How losses and layers of Keras are told apart when a training continues."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from tritium.checkpoint.code import code_of, describe
from tritium.ml.keras.identity import opened


def test_objects_of_keras_are_told_apart_by_their_configurations() -> None:
    losses = [keras.losses.Huber(), keras.losses.Huber(0.5), keras.losses.MeanSquaredError(), "mse", named]
    hashes = [code_of(loss, opened).exact for loss in losses]
    assert len(set(hashes)) == len(losses)
    assert code_of(keras.losses.Huber(), opened).exact == hashes[0]
    assert describe(losses[1], opened).startswith("Huber(")
    assert "delta=0.5" in describe(losses[1], opened)
    one, other = (code_of(keras.layers.Dense(2), opened) for _ in range(2))
    assert one == other, "numbers in automatic names do not count"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras on torch
def test_attributes_of_a_loss_of_keras_count_and_tensors() -> None:
    class Scaled(keras.losses.Loss):  # type: ignore[misc]
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def call(self, label: Any, output: Any) -> Any:
            return self.by * (label - output) ** 2

    def weighted(by: Any) -> Any:
        return lambda label, output: by * (label - output) ** 2

    for make in (Scaled, lambda by: weighted(keras.ops.convert_to_tensor([by]))):
        one, again, other = (code_of(make(by), opened) for by in (1.0, 1.0, 2.0))
        assert one == again
        assert one.exact != other.exact


def named(label: Any, output: Any) -> Any:
    return (label - output) ** 2
