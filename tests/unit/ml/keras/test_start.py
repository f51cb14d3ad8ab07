"""What a rank and a prediction worker need not do before they have a model: import TensorFlow, draw weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

from tritium.model.engines.keras_form import form_of
from tritium.model.engines.keras_here import undrawn

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SEEDED = """
import json, random, sys
import keras, numpy, torch
from tritium.model.engines.keras_here import set_random_seed

def drawn():
    return [random.random(), numpy.random.random(), torch.rand(1).item(), float(keras.random.uniform((1,))[0])]

set_random_seed(3)
found = [drawn(), "tensorflow" in sys.modules]
keras.utils.set_random_seed(3)
print(json.dumps([*found, drawn(), "tensorflow" in sys.modules]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_seeds_are_those_of_keras_and_tensorflow_is_not_imported_for_them(backend: str) -> None:
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", SEEDED], env=environment, capture_output=True, text=True)
    ours, imported, theirs, available = json.loads(done.stdout or pytest.fail(done.stderr))
    if backend == "jax":  # Keras seeds torch on torch alone
        ours[2] = theirs[2]
    assert ours == theirs
    assert not imported
    assert available, "layers of Keras that need TensorFlow still find it"


def model() -> Any:
    layers = keras.layers
    return keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dropout(0.5, seed=7), layers.Dense(1)])


def test_weights_that_are_put_are_not_drawn_before_and_all_others_are() -> None:
    form, other = form_of(model()), ThreadPoolExecutor(1)
    with undrawn():
        inside = form.model()
        beside = other.submit(form.model).result()
    other.shutdown()
    after = form.model()
    for made, zero in ((inside, True), (beside, False), (after, False)):
        kernels = [np.asarray(layer.kernel) for layer in made.layers if hasattr(layer, "kernel")]
        assert [not kernel.any() for kernel in kernels] == [zero, zero]
        dropout = next(layer for layer in made.layers if isinstance(layer, keras.layers.Dropout))
        assert np.asarray(dropout.seed_generator.state.value).tolist() == [7, 0], "a state of random numbers is kept"
    assert inside.layers[0].kernel_initializer.get_config() == after.layers[0].kernel_initializer.get_config()
