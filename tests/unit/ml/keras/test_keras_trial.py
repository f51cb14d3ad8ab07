"""What a user's functions do wrong with Keras is said on the driver, before a rank starts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest

from tritium.errors import BadData, BadSetting
from tritium.ml import KerasEstimator

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
