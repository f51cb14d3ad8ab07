"""Early stopping of LightGBM on a fraction of the rows, and a ranker's fraction of its groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tritium.errors import BadRow, DataChanged
from tritium.ml import LightGBMClassifier, LightGBMRanker, LightGBMRegressor
from tritium.ml.columns import as_frame
from tritium.ml.validation import split

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none"}


def test_early_stopping_is_not_misled_where_equal_rows_have_other_labels() -> None:
    """The best log loss that three categorical features allow is 0.59, and validation rows are like the others."""
    random = np.random.default_rng(0)
    x = random.integers(0, [3, 3, 4], (4000, 3))
    chance = random.uniform(0.1, 0.9, 36)[(x * [12, 4, 1]).sum(axis=1)]
    y = (random.uniform(size=4000) < chance).astype(int)
    best = -np.mean(np.where(y == 1, np.log(chance), np.log(1 - chance)))
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y})
    for seed in range(2):
        model = LightGBMClassifier(
            feature_cols=["a", "b", "c"], label_cols="y", validation=0.2, seed=seed, num_iterations=40,
            early_stopping=10, verbose=False, **HERE,
        ).fit(frame)  # fmt: skip
        losses = [entry["validation_binary_logloss"] for entry in model.history]
        assert min(losses) == pytest.approx(best, abs=0.06)
        assert len(losses) >= 20


def test_a_ranker_draws_by_its_groups_unless_another_column_is_named() -> None:
    random = np.random.default_rng(2)
    frame = pd.DataFrame({"x": random.normal(size=600), "q": np.repeat(np.arange(60), 10)})
    frame = frame.assign(grade=random.integers(0, 3, 600), session=frame["q"] // 6)
    common: dict[str, Any] = {"feature_cols": ["x"], "label_cols": "grade", "group_col": "q", "validation": 0.4}
    for more, column in (({}, "q"), ({"validation_group": "session"}, "session")):
        ranker = LightGBMRanker(**common, **more, num_iterations=1, verbose=False, **HERE)
        rows = split(as_frame(frame, "train"), ranker.settings()[0])
        assert (pd.Series(rows.frame[rows.held].to_pylist()).groupby(frame[column]).nunique() == 1).all()


def test_a_row_without_a_label_is_left_out_and_features_may_still_miss_values() -> None:
    frame = pd.DataFrame({"x": np.arange(60.0), "y": np.arange(60.0) % 7})
    frame.loc[[2, 5], "x"], frame.loc[[7, 8], "y"] = np.nan, np.nan
    settings: dict[str, Any] = {"feature_cols": ["x"], "label_cols": "y", "num_iterations": 2, "verbose": False, **HERE}
    with pytest.raises(BadRow):
        LightGBMRegressor(**settings).fit(frame)
    model = LightGBMRegressor(**settings, on_error="skip").fit(frame)
    assert model.history[-1]["rows_skipped"] == 2
    clean = LightGBMRegressor(**settings).fit(frame.drop(index=[7, 8]))
    assert (model.predict(frame) == clean.predict(frame)).all()


def test_a_fit_that_continues_over_a_frame_in_another_order_needs_a_row_key(tmp_path: Path) -> None:
    """Drawn by their places, rows that were trained on would be validated on."""
    frame = pd.DataFrame({"x": np.arange(200.0), "y": np.arange(200.0) % 7, "id": np.arange(200)})
    settings: dict[str, Any] = {"feature_cols": ["x"], "label_cols": "y", "validation": 0.3, "verbose": False, **HERE}
    settings["run_dir"] = str(tmp_path / "places")
    LightGBMRegressor(**settings, num_iterations=2).fit(frame)
    with pytest.raises(DataChanged, match="row_key= keeps it"):
        LightGBMRegressor(**settings, num_iterations=4).fit(frame[::-1])
    settings |= {"run_dir": str(tmp_path / "keys"), "row_key": "id"}
    LightGBMRegressor(**settings, num_iterations=2).fit(frame)
    assert len(LightGBMRegressor(**settings, num_iterations=4).fit(frame[::-1]).history) == 4
