"""Features of a list of one column, of words, and what labels, weights and categories LightGBM does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest

import tritium as tr
from tritium.errors import BadData, BadRow, BadSetting
from tritium.ml import LightGBMClassifier, LightGBMRanker, LightGBMRegressor

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "num_iterations": 5, "min_data_in_leaf": 5}
HERE["native_params"] = {"num_threads": 1}
PLAIN: dict[str, Any] = {"verbosity": -1, "seed": 0, "num_threads": 1, "min_data_in_leaf": 5}


def rows(count: int = 120) -> pd.DataFrame:
    draw = np.random.default_rng(2)
    frame = pd.DataFrame(
        {"x": draw.normal(size=count), "c": draw.integers(0, 4, count), "y": draw.uniform(0.1, 1, count)}
    )
    frame["v"] = list(frame[["x", "c"]].to_numpy())
    frame["cls"], frame["q"] = frame.c % 2, np.arange(count) // 6
    frame["word"] = np.array(["oslo", "rome", "bonn", "lima"])[frame.c]
    return frame


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (LightGBMRegressor, {"label_cols": "y"}),
        (LightGBMClassifier, {"label_cols": "cls"}),
        (LightGBMRanker, {"label_cols": "cls", "group_col": "q"}),
    ],
)
def test_a_list_of_one_array_column_is_that_column(kind: Any, settings: dict[str, Any]) -> None:
    frame = rows()
    settings = HERE | settings | {"monotone_constraints": {0: 1}, "categorical_features": [1]}
    one, listed = (kind(feature_cols=given, **settings).fit(frame) for given in ("v", ["v"]))
    assert one.booster().model_to_string() == listed.booster().model_to_string()
    assert one.feature_importances() == listed.feature_importances()
    assert list(listed.feature_importances()) == listed.booster().feature_name() == ["v_0", "v_1"]
    alone = kind(feature_cols=["x"], **settings | {"monotone_constraints": {"x": 1}, "categorical_features": ()})
    assert list(alone.fit(frame).feature_importances()) == ["x"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"feature_cols": ["v"], "categorical_features": [2]}, "names position 2, and 'v' has 2 numbers a row"),
        ({"feature_cols": ["v"], "monotone_constraints": {7: 1}}, "names position 7, and 'v' has 2 numbers a row"),
        ({"feature_cols": ["v"], "categorical_features": ["x"]}, "of the column 'v' say the position in it, from 0"),
        ({"feature_cols": ["x"], "categorical_features": [0]}, "names 0, which is not among feature_cols"),
        ({"feature_cols": ["x", "c"], "categorical_features": [1]}, "names 1, which is not among feature_cols"),
        ({"feature_cols": ["v", "x"]}, "which can't stand beside other columns of numbers. Put all into one, by"),
        (
            {"feature_cols": ["v"], "categorical_features": [1], "monotone_constraints": {1: 1}},
            "1, which is a category",
        ),
        (
            {"feature_cols": ["x", "word"], "vocabulary": ["word"], "monotone_constraints": {"word": 1}},
            "monotone_constraints names 'word', which is a category",
        ),
        (
            {"feature_cols": "word", "hash_buckets": {"word": 1 << 25}},
            "is more than float32 tells apart. Give at most 16777216",
        ),
        ({"feature_cols": "x", "label_cols": "v"}, "label column 'v' is list<item: double>; a label is one number"),
        ({"feature_cols": "x", "init_score_col": "v"}, "an init_score is one number a row"),
        ({"feature_cols": "x", "init_score_col": ["x", "c"]}, "names 2 columns; several are for several classes"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_anything_starts(settings: dict[str, Any], says: str) -> None:
    with pytest.raises((BadSetting, BadData)) as caught:
        LightGBMRegressor(**HERE | {"label_cols": "y"} | settings).fit(rows())
    assert says in str(caught.value)


def test_there_are_scores_to_begin_with_for_each_class() -> None:
    frame = rows()
    settings: dict[str, Any] = HERE | {"feature_cols": "x", "label_cols": "c"}
    with pytest.raises(BadSetting, match=r"names 2 columns; this model, of 4 classes, takes 4"):
        LightGBMClassifier(**settings, init_score_col=["x", "y"]).fit(frame)
    with pytest.raises(BadSetting, match=r"names 2 columns; this model, of 2 classes, takes 1"):
        LightGBMClassifier(**settings | {"label_cols": "cls"}, init_score_col=["x", "y"]).fit(frame)
    for i in range(4):
        frame[f"s{i}"] = 0.1 * i
    model = LightGBMClassifier(**settings, init_score_col=[f"s{i}" for i in range(4)]).fit(frame)
    assert model.booster().num_model_per_iteration() == 4


def test_words_beside_numbers_are_categories(tmp_path: Path) -> None:
    frame = rows(400).assign(y=lambda f: f.y + f.c % 2)
    frame.loc[::9, "word"] = None
    settings: dict[str, Any] = HERE | {"label_cols": "y", "feature_cols": ["word", "x"], "unknown_words": "keep"}
    model = LightGBMRegressor(**settings, vocabulary={"word": ["rome", "oslo", "bonn", "lima"]}).fit(frame)
    codes = frame.word.map({"rome": 0, "oslo": 1, "bonn": 2, "lima": 3})
    x = np.stack([frame.x, codes], axis=1).astype(np.float32)
    data = lightgbm.Dataset(x, frame.y, categorical_feature=[1])
    plain = lightgbm.train({**PLAIN, "objective": "regression"}, data, 5)
    np.testing.assert_array_equal(model.predict(frame), plain.predict(x))
    assert list(model.feature_importances()) == model.booster().feature_name() == ["x", "word"]
    assert model.feature_importances()["word"] > 0
    model.model.save(str(tmp_path / "model"))
    loaded = tr.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict(frame), plain.predict(x))
    others = frame.assign(word="nowhere")
    np.testing.assert_array_equal(loaded.predict(others), plain.predict(np.stack([x[:, 0], np.full(400, 4)], axis=1)))

    learnt = LightGBMRegressor(**settings, vocabulary=["word"]).fit(frame)
    np.testing.assert_allclose(learnt.predict(frame), model.predict(frame), rtol=1e-12)
    hashed = LightGBMRegressor(**settings, hash_buckets={"word": 1000}).fit(frame)
    assert hashed.history[-1]["l2"] == pytest.approx(model.history[-1]["l2"], rel=1e-6)
    alone = LightGBMRegressor(**settings | {"feature_cols": ["word"]}, vocabulary=["word"]).fit(frame)
    assert "==" in alone.booster().trees_to_dataframe().decision_type.tolist(), "a split by category"


def test_a_ranker_takes_groups_that_are_words() -> None:
    frame = rows().assign(query=lambda f: f.q.map(lambda number: f"query {number}"))
    settings: dict[str, Any] = HERE | {"feature_cols": ["x", "c"], "label_cols": "cls"}
    for named in (frame, frame.astype({"query": "category"})):
        model = LightGBMRanker(**settings, group_col="query").fit(named)
        number = LightGBMRanker(**settings, group_col="q").fit(frame)
        np.testing.assert_array_equal(model.predict(frame), number.predict(frame))
        assert {**model.history[-1], "seconds": 0} == {**number.history[-1], "seconds": 0}
    frame.loc[31, "query"] = None
    with pytest.raises(BadRow, match=r"column 'query' .* is null in row 31"):
        LightGBMRanker(**settings, group_col="query").fit(frame)


def changed(column: str, value: float) -> pd.DataFrame:
    """Return the rows with this value in row 5 and in row 9."""
    frame = rows().assign(w=1.0)
    frame[column] = frame[column].astype(float)
    frame.loc[[5, 9], column] = value
    return frame


@pytest.mark.parametrize(
    ("column", "value", "settings", "says"),
    [
        ("y", np.inf, {}, "label column 'y' of 'train', row 5, is inf (and 1 more of this rank's rows)"),
        ("w", -1, {"weight_col": "w"}, "weight column 'w' of 'train', row 5, is -1 (and 1 more"),
        ("w", np.inf, {"weight_col": "w"}, "weight column 'w' of 'train', row 5, is inf"),
        (
            "y",
            -1,
            {"objective": "poisson"},
            "is -1 (and 1 more of this rank's rows): objective='poisson' takes numbers",
        ),
        ("y", -1, {"objective": "tweedie"}, "objective='tweedie' takes numbers of at least 0"),
        (
            "y",
            0,
            {"objective": "gamma"},
            "label column 'y' of 'train', row 5, is 0 (and 1 more of this rank's rows)",
        ),
        ("y", 2, {"objective": "cross_entropy"}, "objective='cross_entropy' takes numbers from 0 to 1"),
        ("cls", 31, {"label_cols": "cls", "group_col": "q"}, "is 31 (and 1 more of this rank's rows): a relevance is"),
        ("cls", 0.5, {"label_cols": "cls", "group_col": "q"}, "a relevance is a whole number from 0 to 30"),
    ],
)
def test_values_that_lightgbm_does_not_take_are_named(
    column: str, value: float, settings: dict[str, Any], says: str
) -> None:
    kind = LightGBMRanker if "group_col" in settings else LightGBMRegressor
    with pytest.raises(BadRow) as caught:
        kind(**HERE | {"feature_cols": ["x"], "label_cols": "y"} | settings).fit(changed(column, value))
    assert says in str(caught.value)
    assert (caught.value.column, caught.value.row_id, caught.value.value) == (column, 5, value)
    with pytest.raises(BadRow, match="of 'validation', row "):
        kind(**HERE | {"feature_cols": ["x"], "label_cols": "y", "validation": changed(column, value)} | settings).fit(
            rows().assign(w=1.0)
        )


def test_labels_and_weights_that_are_all_zero() -> None:
    settings: dict[str, Any] = HERE | {"feature_cols": ["x"], "label_cols": "y"}
    with pytest.raises(BadData, match=r"label column 'y' holds only zeros .* 'poisson' needs one above 0"):
        LightGBMRegressor(**settings, objective="poisson").fit(rows().assign(y=0.0))
    with pytest.raises(BadData, match=r"weight column 'w' of 'train' holds only zeros"):
        LightGBMRegressor(**settings, weight_col="w").fit(rows().assign(w=0.0))
    with pytest.raises(BadData, match=r"weight column 'w' of 'validation' holds only zeros"):
        LightGBMRegressor(**settings, weight_col="w", validation=rows().assign(w=0)).fit(rows().assign(w=1))
    zero = LightGBMRegressor(**settings, objective="gamma", metrics="l2").fit(changed("y", 0))
    assert zero.history[-1]["l2"] < 1, "it is the metric that takes no zeros"


@pytest.mark.processes
def test_a_rank_whose_weights_are_all_zero_has_no_part_in_the_metrics() -> None:
    frame = rows().assign(w=lambda f: (f.index < 60) * 1.0)
    settings: dict[str, Any] = HERE | {"feature_cols": ["x", "c"], "label_cols": "y", "weight_col": "w"}
    model = LightGBMRegressor(**settings | {"on": "driver", "ranks": 2, "min_data_in_leaf": 1}).fit(frame)
    error = (model.predict(frame) - frame.y)[:60]
    assert model.history[-1]["l2"] == pytest.approx((error**2).mean(), rel=1e-6)


def test_categories_beyond_what_lightgbm_holds() -> None:
    settings: dict[str, Any] = HERE | {"feature_cols": ["x", "c"], "label_cols": "y", "categorical_features": ["c"]}
    with pytest.raises(BadRow, match=r"feature_dtype='float64', and its categories are numbered .*\(StringIndexer\)"):
        LightGBMRegressor(**settings).fit(rows().assign(c=lambda f: f.c + 2**24))
    with pytest.raises(BadData, match=r"column 'c' holds .* which are below 2\*\*31. Index it with StringIndexer"):
        LightGBMRegressor(**settings, feature_dtype="float64").fit(rows().assign(c=lambda f: f.c * 2**31))
    with pytest.raises(BadData, match=r"column 'c' holds inf and is among categorical_features"):
        LightGBMRegressor(**settings).fit(rows().assign(c=np.inf))


def test_interaction_constraints_are_lists_of_positions(tmp_path: Path) -> None:
    frame, native = rows(), {"interaction_constraints": [[0], [1]], "num_threads": 1}
    settings: dict[str, Any] = HERE | {"feature_cols": ["x", "c"], "label_cols": "y", "native_params": native}
    settings |= {"run_dir": str(tmp_path)}
    model = LightGBMRegressor(**settings).fit(frame)
    x = frame[["x", "c"]].to_numpy(np.float32)
    params = {**PLAIN, "objective": "regression", "interaction_constraints": [[0], [1]]}
    np.testing.assert_array_equal(
        model.predict(frame), lightgbm.train(params, lightgbm.Dataset(x, frame.y), 5).predict(x)
    )
    assert len(LightGBMRegressor(**settings | {"num_iterations": 7}).fit(frame).history) == 7
