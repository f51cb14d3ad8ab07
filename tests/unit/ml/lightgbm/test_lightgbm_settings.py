"""What LightGBM can't be trained with is refused before anything starts."""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tritium.errors import BadData, BadSetting
from tritium.ml import EarlyStopping, LightGBMClassifier, LightGBMRanker, LightGBMRegressor

X = ["a", "b", "c"]
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}
KINDS = {"classifier": LightGBMClassifier, "regressor": LightGBMRegressor, "ranker": LightGBMRanker}


def table(rows: int = 60) -> pa.Table:
    draw = np.random.default_rng(1)
    columns: dict[str, Any] = {name: draw.normal(size=rows) for name in [*X, "y"]}
    columns |= {"cls": np.arange(rows) % 3, "q": np.arange(rows) // 6, "word": ["x"] * rows, "whole": np.arange(rows)}
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(draw.normal(size=rows * 4)), 4)
    columns["gap"] = (np.arange(rows) % 3) * 2
    columns["half"] = np.arange(rows) / 2
    columns["one"] = np.zeros(rows, int)
    columns["query"] = pa.array([None if i == 31 else i // 6 for i in range(rows)], pa.int64())
    return pa.table(columns)


def refused(kind: str, **settings: Any) -> str:
    given = {"feature_cols": X, "label_cols": "cls" if kind == "classifier" else "y", **HERE}
    given |= {"label_cols": "cls", "group_col": "q"} if kind == "ranker" else {}
    with pytest.raises((BadData, BadSetting)) as caught:
        KINDS[kind](**{**given, **settings}).fit(table())
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("regressor", {"num_leaves": 1}, "num_leaves=1 must be a whole number of at least 2."),
        ("regressor", {"trace": "torch", "on": "driver"}, "With 'lightgbm', trace= is True or False."),
        ("regressor", {"learning_rate": 0}, "learning_rate=0 must be a number above 0."),
        ("regressor", {"feature_fraction": 1.5}, "feature_fraction=1.5 must be a number above 0 and at most 1."),
        ("regressor", {"bagging_fraction": 0.5}, "does nothing with bagging_freq=0. Give bagging_freq=1."),
        ("regressor", {"objective": "binary"}, "objective='binary' is none of those for this estimator: 'regression'"),
        (
            "classifier",
            {"objective": "binary", "num_class": 3},
            'is for two classes, and num_class=3. Use "multiclass"',
        ),
        ("regressor", {"feature_cols": {"x": X}}, "feature_cols is a mapping; LightGBM takes one input"),
        ("regressor", {"feature_cols": ["a", "a"]}, "feature_cols=['a', 'a'] names a column twice."),
        ("regressor", {"label_cols": ["y", "a"]}, "label_cols=['y', 'a'] must be one column."),
        ("regressor", {"categorical_features": ["word"]}, "names 'word', which is not among feature_cols."),
        ("regressor", {"monotone_constraints": {"a": 2}}, "each must be -1, 0 or 1."),
        (
            "regressor",
            {"feature_cols": "vector", "categorical_features": ["a"]},
            "of the column 'vector' say the posit",
        ),
        ("regressor", {"feature_cols": "vector", "monotone_constraints": {4: 1}}, "'vector' has 4 numbers a row."),
        ("regressor", {"tree_learner": "serial", "ranks": 2, "on": "driver"}, "is for one rank, and there are 2."),
        ("regressor", {"min_data_in_leaf": 0, "ranks": 2, "on": "driver"}, "min_data_in_leaf=0 is for one rank, and"),
        ("regressor", {"early_stopping": 3, "training_metric": False}, "needs validation=, or training_metric=True."),
        (
            "regressor",
            {"early_stopping": 3, "boosting": "dart"},
            'can\'t restore an earlier model with boosting="dart"',
        ),
        ("regressor", {"early_stopping": EarlyStopping(monitor="loss")}, "monitors 'loss'; the history will have l2."),
        (
            "ranker",
            {"early_stopping": EarlyStopping(mode="min", monitor="ndcg@1")},
            "a larger value is the better one.",
        ),
        ("regressor", {"params": {"a": 1}}, "There is no setting 'params'. That is what Spark ML calls all settings"),
        ("regressor", {"numLeaves": 5}, "There is no setting 'numLeaves'. Did you mean 'num_leaves'?"),
        ("regressor", {"min_gain_to_split": 1}, "Give it to LightGBM by native_params={'min_gain_to_split': …}."),
        ("regressor", {"native_params": {"eta": 1}}, "native_params names 'eta'; give the setting learning_rate= for"),
        ("regressor", {"native_params": {"machines": "a"}}, "'machines'; the ranks are connected by Tritium."),
        ("regressor", {"native_params": {"linear_tree": True}}, "can't grow linear trees from rows that come in batch"),
        ("regressor", {"native_params": {"min_gain": 1}}, "LightGBM has no parameter 'min_gain' (of native_params=)."),
        ("regressor", {"native_params": {"extra_seed": {}}}, "must be a number, a string, a bool, or a list of these."),
        (
            "regressor",
            {"metrics": "loggloss"},
            "names 'loggloss', which LightGBM does not compute for objective='regression'.",
        ),
        ("regressor", {"feature_cols": [*X, "word"]}, "feature column 'word' is a string"),
        ("ranker", {"group_col": "nowhere"}, "group column 'nowhere' is missing."),
        ("ranker", {"group_col": "a"}, "group column 'a' is double; a group is told by one integer or word a row"),
        ("classifier", {"label_cols": "gap"}, "has no rows of class 1 and rows of class 4. Number the classes"),
        ("classifier", {"label_cols": "one"}, "has only class 0."),
        ("classifier", {"label_cols": "half"}, "label column 'half' must hold class indices, and holds 0.5"),
        ("classifier", {"num_class": 2}, "holds 2 in the rows, and there are 2 classes, from 0 on."),
        ("regressor", {"categorical_features": ["a"]}, "is among categorical_features, which are whole numbers."),
    ],
)
def test_what_is_wrong_is_said(kind: str, settings: dict[str, Any], says: str) -> None:
    assert says in refused(kind, **settings)


def test_words_and_what_takes_their_place() -> None:
    rows = pd.DataFrame({"c": ["a", "b"] * 40, "x": np.arange(80.0), "y": [1.0, 2.0] * 40})
    rows["code"] = rows.c.astype("category").cat.codes
    small: dict[str, Any] = {"label_cols": "y", "num_iterations": 5, "min_data_in_leaf": 5, **HERE}
    with pytest.raises(BadData, match=r"'c' is a string. Its words become categories: learn them, vocabulary=\['c'\]"):
        LightGBMRegressor(feature_cols=["c", "x"], **small).fit(rows)
    with pytest.raises(BadSetting, match=r"decode=\['c'\]: LightGBM takes numbers as the DataFrame has them"):
        LightGBMRegressor(feature_cols="c", decode={"c": len}, **small).fit(rows)
    numbered = LightGBMRegressor(feature_cols=["code", "x"], categorical_features=["code"], **small).fit(rows)
    alone = LightGBMRegressor(feature_cols=["c"], vocabulary=["c"], **small).fit(rows)
    beside = [
        LightGBMRegressor(feature_cols=["c", "x"], **small, **given).fit(rows)
        for given in ({"vocabulary": ["c"]}, {"hash_buckets": {"c": 8}})
    ]
    for model in (numbered, alone, *beside):
        first, second = model.transform(rows)["prediction"][:2]
        assert first < 1.5 < second


def test_a_ranker_needs_its_group_column() -> None:
    with pytest.raises(BadSetting, match="group_col must be given"):
        LightGBMRanker(feature_cols=X, label_cols="cls", **HERE).fit(table())


def test_a_group_that_is_null_is_refused_with_its_row() -> None:
    from tritium.errors import BadRow

    with pytest.raises(BadRow, match=r"column 'query' .* is null in row 31. "):
        LightGBMRanker(feature_cols=X, label_cols="cls", group_col="query", **HERE).fit(table())


def test_every_setting_is_a_param() -> None:
    estimator = LightGBMRanker(feature_cols=X, label_cols="cls", group_col="q", num_leaves=np.int64(7), **HERE)
    assert estimator.getNumLeaves() == 7
    assert estimator.setLearningRate(0.3).getLearningRate() == 0.3
    assert "most leaves that a tree may have" in estimator.explainParam("num_leaves")
    settings, gang = estimator.settings()
    assert (settings.num_leaves, gang.framework) == (7, "lightgbm")


def test_parameters_that_a_callback_resets_are_tried_on_the_driver() -> None:
    reset = lightgbm.reset_parameter(learning_rate=[0.1, 0.05])
    message = refused("regressor", num_iterations=5, callbacks=[reset])
    assert message.startswith("the callback _ResetParameterCallback fails before iteration 0: ValueError: Length of")


def test_images_are_refused() -> None:
    image = {"origin": "a", "height": 1, "width": 1, "nChannels": 1, "mode": 0, "data": b"0"}
    with pytest.raises(BadData, match=r"feature column 'image' is an image\. Make numbers of it"):
        LightGBMRegressor(feature_cols="image", label_cols="y", **HERE).fit(pa.table({"image": [image], "y": [1.0]}))
