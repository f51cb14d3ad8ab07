"""The weights of a compiled model's losses are part of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest

from tritium.errors import BadSetting
from tritium.ml import KerasEstimator

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}


def frame(rows: int = 40) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    found = pd.DataFrame({"a": draw.random(rows, np.float32), "b": draw.random(rows, np.float32)})
    return found.assign(y=found.a + found.b, z=found.a - found.b, w=np.ones(rows), s=np.zeros(rows))


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_a_compiled_models_loss_weights_are_part_of_its_training(tmp_path: Path) -> None:
    def estimator(weight: float, **settings: Any) -> KerasEstimator:
        given = keras.Input((2,), name="x")
        outputs = {"y": keras.layers.Dense(1, name="y")(given), "z": keras.layers.Dense(1, name="z")(given)}
        model = keras.Model(given, outputs)
        model.compile("sgd", {"y": "mse", "z": "mse"}, loss_weights={"y": 1.0, "z": weight})
        columns = {"feature_cols": ["a", "b"], "label_cols": {"y": "y", "z": "z"}, "run_dir": str(tmp_path)}
        return KerasEstimator(**{"model": model, "epochs": 2, **columns, **HERE} | settings)

    estimator(1.0, epochs=1).fit(frame())
    with pytest.raises(BadSetting, match=r"loss_weights: {'y': 1.0, 'z': 9.0}, was {'y': 1.0, 'z': 1.0}"):
        estimator(9.0).fit(frame())
    assert len(estimator(1.0, loss_weights={"y": 1.0, "z": 1.0}).fit(frame()).history) == 2
