"""What a user's functions do wrong with Keras is said on the driver, before a rank starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import tritium as tr
from tritium.errors import BadData, BadSetting
from tritium.ml import KerasEstimator, KerasSettings
from tritium.ml.fitting import Plan, prepare, run
from tritium.ml.keras.backend import KerasBackend

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
COLUMNS: dict[str, Any] = {"feature_cols": ["a", "b"], "label_cols": ["y"], "verbose": False}
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none"}


def rows(count: int = 20) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame({name: draw.random(count) for name in ("a", "b", "y")})


def refused(frame: pd.DataFrame | None = None, **changes: Any) -> str:
    given: dict[str, Any] = {"model": net, "loss": "mse", "optimizer": "sgd", **COLUMNS, **HERE}
    with pytest.raises((BadData, BadSetting)) as caught:
        KerasEstimator(**given | changes).fit(rows() if frame is None else frame)
    return str(caught.value)


class Late(keras.callbacks.Callback):
    """A callback that forgets an argument."""

    def on_epoch_end(self, epoch: int) -> None:
        raise AssertionError


def net() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"callbacks": [Late()]}, "on_epoch_end of the callback Late takes epoch; it is called with (epoch, logs)."),
        ({"metrics": [lambda label, output: label[:, 5]]}, "Loss or metrics can't take what there is"),
        ({"optimizer": lambda: keras.optimizers.Adam(lr=0.1)}, "could not be made and compiled"),
    ],
    ids=["callback", "metric", "optimizer"],
)
def test_functions_of_keras(changes: dict[str, Any], says: str) -> None:
    assert says in refused(**changes)


def test_steps_that_are_not_compiled_are_refused_for_several_ranks_on_jax() -> None:
    def check(ranks: int, backend: str) -> None:
        settings = KerasSettings(model=net, loss="mse", optimizer="sgd", run_eagerly=True, **COLUMNS)
        settings.check_gang(tr.Gang(ranks=ranks, framework=tr.Keras(backend=backend)))

    with pytest.raises(BadSetting, match=r"run_eagerly=True can't train on several ranks .*ranks=1"):
        check(2, "jax")
    check(1, "jax")
    check(2, "torch")


def test_torchs_profiler_is_refused() -> None:
    assert "With 'keras', trace= is True or False." in refused(trace="torch", on="driver")


# ---- inputs


def of_image() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([layers.Input((4, 4, 3)), layers.Flatten(), layers.Dense(1)])


def squeezes() -> keras.Model:
    inputs = keras.layers.Input((48,))
    return keras.Model(inputs, keras.ops.squeeze(keras.layers.Dense(1)(inputs)))


def mean(label: Any, output: Any) -> Any:
    return keras.ops.mean(output)


def sixth(label: Any, output: Any) -> Any:
    return label[:, 5]


INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"model": of_image},
        "Its input is [batch, 4, 4, 3], which has as many numbers: begin with the layers Input((48,)) and "
        "Reshape((4, 4, 3)).",
    ),
    "squeezes": (
        {"model": squeezes, "loss": mean},
        "The model's output 'prediction' is [2] for 2 rows and [] for one. Let it have a row for each row, also",
    ),
    "metric": ({"metrics": [sixth]}, "Loss or metrics can't take what there is"),
}


def arrays(count: int = 8) -> pa.Table:
    draw = np.random.default_rng(0)
    return pa.table({"v": draw.random((count, 48)).tolist(), "y": draw.random(count)})


def planned(frame: pa.Table, **changes: Any) -> Plan:
    given: dict[str, Any] = {"model": net, "loss": "mse", "optimizer": "sgd", **COLUMNS, "feature_cols": "v"}
    return prepare(KerasBackend(), frame, KerasSettings(**given | changes), tr.Gang(on="here", framework="keras"))


def trained(frame: pa.Table, gang: dict[str, Any], **changes: Any) -> Any:
    """Train on rows that the driver has not seen."""
    plan = planned(frame.slice(0, 0), **changes)
    data = {"train": dataclasses.replace(plan.data["train"], frame=frame)}
    return run(dataclasses.replace(plan, gang=dataclasses.replace(plan.gang, **gang), data=data))


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_are_refused_in_the_same_words_on_the_driver_and_in_a_rank(case: str) -> None:
    changes, says = INPUTS[case]
    with pytest.raises(BadData) as known:
        planned(arrays(), **changes)
    assert says in str(known.value)
    with pytest.raises(BadData) as caught:
        trained(arrays(), HERE, **changes)
    assert str(caught.value) == str(known.value)


@pytest.mark.processes
def test_two_ranks_train_on_arrays_whose_length_the_first_of_them_sees() -> None:
    gang: dict[str, Any] = {"on": "driver", "ranks": 2, "progress": False, "output": "none", "retries": 0}
    model = trained(arrays(), gang)
    assert model.signature.inputs[0].shape == (48,)
    assert len(model.history) == 1
    with pytest.raises(BadData, match="which has as many numbers"):
        trained(arrays(), gang, model=of_image)
