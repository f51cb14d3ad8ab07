"""FunctionEstimator: what its functions may do, and what is tried before them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from tritium.errors import BadSetting
from tritium.ml import FunctionEstimator

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}


def frame(rows: int) -> pd.DataFrame:
    return pd.DataFrame({"a": np.arange(rows) + 1.0, "b": np.arange(rows) * 0.5, "y": np.ones(rows)})


def squeezes(state: Any, batch: Any) -> Any:
    return (batch["features"] @ np.ones((2, 1))).squeeze()


def squeezes_several(state: Any, batch: Any) -> Any:
    return {"sum": squeezes(state, batch), "both": (batch["features"] * 2).squeeze()}


@pytest.mark.parametrize("rows", [1, 5])
def test_one_that_squeezes_predicts_a_batch_of_one_row(rows: int) -> None:
    settings: dict[str, Any] = {"train": lambda world, settings: 0, "feature_cols": ["a", "b"], "label_cols": ["y"]}
    model = FunctionEstimator(**settings, predict=squeezes, prediction_batch_size=2, **HERE).fit(frame(rows)).model
    for count in (1, 5):
        data = frame(count)
        np.testing.assert_allclose(model.predict(data, batch_size=2), data.a + data.b)
    several = FunctionEstimator(**settings, predict=squeezes_several, **HERE).fit(frame(rows)).model
    found = several.predict(frame(3), batch_size=2)
    np.testing.assert_allclose(found["both"], 2 * frame(3)[["a", "b"]].to_numpy())
    np.testing.assert_allclose(found["sum"], frame(3).a + frame(3).b)


def test_how_values_are_decoded_is_tried_before_the_training() -> None:
    settings: dict[str, Any] = {"train": lambda world, settings: 0, "predict": squeezes, "feature_cols": "a"}
    words = frame(3).assign(a=["x", "y", "z"])
    with pytest.raises(BadSetting, match=r"decode=\{'a': <lambda>\} fails for the first value: AttributeError"):
        FunctionEstimator(**settings, decode={"a": lambda word: word.tolist()}, **HERE).fit(words)
