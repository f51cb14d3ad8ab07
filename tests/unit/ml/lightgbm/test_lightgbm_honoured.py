"""Settings of LightGBM that were ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from tritium.errors import BadRow, BadSetting
from tritium.ml import EarlyStopping, LightGBMRegressor

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}


def frame(rows: int = 40) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    found = pd.DataFrame({"a": draw.random(rows, np.float32), "b": draw.random(rows, np.float32)})
    return found.assign(y=found.a + found.b, z=found.a - found.b, w=np.ones(rows), s=np.zeros(rows))


def lightgbm(**settings: Any) -> LightGBMRegressor:
    given = {"feature_cols": ["a", "b"], "label_cols": "y", "num_iterations": 4, "min_data_in_leaf": 2, **HERE}
    return LightGBMRegressor(**given | settings)


@pytest.mark.parametrize(("column", "role"), [("y", "label"), ("w", "weight"), ("s", "init_score")])
def test_lightgbm_takes_nan_in_features_alone(column: str, role: str) -> None:
    rows = frame()
    rows.loc[3, "a"] = np.nan
    settings = {"weight_col": "w", "init_score_col": "s"}
    assert len(lightgbm(**settings).fit(rows).predict(rows)) == len(rows)
    rows.loc[[5, 9], column] = np.nan
    with pytest.raises(BadRow, match=rf"{role} column '{column}' of 'train', row 5, is NaN \(and 1 more") as caught:
        lightgbm(**settings).fit(rows)
    assert (caught.value.column, caught.value.row_id) == (column, 5)


def test_a_monitor_of_metrics_that_are_not_computed() -> None:
    rule = EarlyStopping(monitor="l2", patience=1)
    with pytest.raises(BadSetting, match=r"training_metric=False leaves out. Monitor 'validation_l2'"):
        lightgbm(training_metric=False, validation=0.3, early_stopping=rule).fit(frame())


def test_early_stopping_is_not_a_native_parameter() -> None:
    with pytest.raises(BadSetting, match="give the setting early_stopping= for it"):
        lightgbm(native_params={"early_stopping_min_delta": 1.0}).fit(frame())
