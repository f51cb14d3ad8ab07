"""One rank in this process trains what LightGBM itself trains, and its model is saved, loaded and called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from lightgbm.callback import EarlyStopException
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

import tritium as tr
from tritium.errors import BadData, BadSetting, EmptyShard, ModelError
from tritium.ml import EarlyStopping, LightGBMClassifier, LightGBMModel, LightGBMRanker, LightGBMRegressor

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "num_iterations": 12}
HERE["native_params"] = {"num_threads": 1}
PLAIN: dict[str, Any] = {"verbosity": -1, "seed": 0, "num_threads": 1}


def diabetes() -> tuple[pd.DataFrame, list[str]]:
    """Return the rows with missing values in bmi, and a weight."""
    data = load_diabetes(as_frame=True)
    frame = data.frame.assign(weight=np.linspace(0.5, 2, len(data.frame)), start=data.frame.target.mean())
    frame.loc[::7, "bmi"] = np.nan
    frame["sex"] = (frame.sex > 0).astype(int)
    return frame, list(data.data.columns)


def trained(params: dict[str, Any], data: lightgbm.Dataset) -> tuple[lightgbm.Booster, dict[str, float]]:
    """Return the booster that LightGBM trains in 12 iterations, and its last metrics."""
    seen: dict[str, Any] = {}
    record = lightgbm.record_evaluation(seen)
    plain = lightgbm.train({**PLAIN, **params}, data, 12, valid_sets=[data], callbacks=[record])
    return plain, {name: values[-1] for name, values in seen["training"].items()}


def test_a_regressor_is_lightgbm_with_weights_categories_constraints_and_scores() -> None:
    frame, names = diabetes()
    model = LightGBMRegressor(
        feature_cols=names,
        label_cols="target",
        weight_col="weight",
        init_score_col="start",
        categorical_features=["sex"],
        monotone_constraints={"bmi": 1, "s5": 1},
        bagging_fraction=0.7,
        bagging_freq=1,
        metrics=["rmse", "l1"],
        **HERE | {"native_params": {"min_gain_to_split": 0.5, "num_threads": 1}},
    ).fit(frame)
    constraints = [int(name in ("bmi", "s5")) for name in names]
    params = {"objective": "regression", "bagging_fraction": 0.7, "bagging_freq": 1, "min_gain_to_split": 0.5}
    x = frame[names].to_numpy(np.float32)
    data = lightgbm.Dataset(
        x, frame.target, weight=frame.weight, init_score=frame.start, categorical_feature=[names.index("sex")]
    )
    params |= {"monotone_constraints": constraints, "metric": ["rmse", "l1"]}
    plain, metrics = trained(params, data)
    np.testing.assert_array_equal(model.predict(frame), plain.predict(x))
    assert model.history[-1].items() >= {"iteration": 12, **metrics}.items()
    gains = model.feature_importances("gain")
    assert list(gains) == names
    assert list(gains.values()) == plain.feature_importance("gain").tolist()
    assert sum(model.feature_importances().values()) == sum(plain.feature_importance("split"))


def test_classifiers_are_lightgbm_for_two_classes_and_for_several() -> None:
    for data, objective in ((load_breast_cancer(as_frame=True), "binary"), (load_digits(as_frame=True), "multiclass")):
        frame, names = data.frame.astype({"target": float}), list(data.data.columns)  # as StringIndexer's labels
        model = LightGBMClassifier(feature_cols=names, label_cols="target", feature_dtype="float64", **HERE).fit(frame)
        found = model.predict(frame)
        params = {"objective": objective} | ({"num_class": 10} if objective == "multiclass" else {})
        plain, _ = trained(params, lightgbm.Dataset(data.data.to_numpy(), data.target))
        expected = plain.predict(data.data.to_numpy())
        expected = expected if expected.ndim == 2 else np.stack([1 - expected, expected], axis=1)
        np.testing.assert_array_equal(found["probability"], expected)
        np.testing.assert_array_equal(found["prediction"], expected.argmax(axis=1))
        assert (found["prediction"] == frame.target).mean() > 0.95


def queries(rows: int = 900) -> pd.DataFrame:
    """Return rows of 60 queries in mixed order, with a relevance of 0 to 3 that two columns decide."""
    draw = np.random.default_rng(3)
    frame = pd.DataFrame({"q": draw.integers(0, 60, rows) * 7 - 50, "a": draw.normal(size=rows), "b": 0.0})
    frame["b"] = draw.normal(size=rows)
    frame["grade"] = np.digitize(frame.a + frame.b / 2 + draw.normal(size=rows) / 3, [-0.5, 0.7, 1.4])
    return frame


def test_a_ranker_is_lightgbm_over_groups_that_come_in_any_order() -> None:
    frame = queries()
    settings: dict[str, Any] = {"feature_cols": ["a", "b"], "label_cols": "grade", "group_col": "q", "eval_at": [1, 5]}
    model = LightGBMRanker(**settings, **HERE).fit(frame)
    ordered = frame.sort_values("q", kind="stable")
    x = ordered[["a", "b"]].to_numpy(np.float32)
    data = lightgbm.Dataset(x, ordered.grade, group=ordered.groupby("q").size().to_numpy())
    plain, metrics = trained({"objective": "lambdarank", "eval_at": [1, 5]}, data)
    np.testing.assert_array_equal(model.predict(ordered), plain.predict(x))
    assert model.history[-1].items() >= metrics.items()
    parts = LightGBMRanker(**settings, **HERE, validation=0.3).fit(frame)
    assert 0.8 < parts.history[-1]["validation_ndcg@5"] <= 1


def test_early_stopping_restores_the_best_iteration() -> None:
    frame, names = diabetes()
    settings: dict[str, Any] = {**HERE, "num_iterations": 200, "validation": frame[300:], "num_leaves": 7}
    model = LightGBMRegressor(feature_cols=names, label_cols="target", early_stopping=5, **settings).fit(frame[:300])
    losses = [entry["validation_l2"] for entry in model.history]
    best = int(np.argmin(losses)) + 1
    assert len(losses) == best + 5 < 200
    assert model.booster().num_trees() == best
    error = ((model.predict(frame[300:]) - frame.target[300:]) ** 2).mean()
    assert error == pytest.approx(losses[best - 1], rel=1e-6)
    rule = EarlyStopping(patience=5, restore_best=False)
    last = LightGBMRegressor(feature_cols=names, label_cols="target", early_stopping=rule, **settings).fit(frame[:300])
    assert last.booster().num_trees() == best + 5


def test_a_model_is_saved_as_lightgbms_text_and_loaded_without_trust(tmp_path: Path) -> None:
    frame, names = diabetes()
    model = LightGBMRegressor(feature_cols=names, label_cols="target", **HERE).fit(frame)
    assert isinstance(model, LightGBMModel)
    model.model.save(str(tmp_path / "model"))
    assert {file.name for file in (tmp_path / "model").iterdir()} >= {"model.txt", "manifest.json"}
    again = tr.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    table = pa.Table.from_pandas(frame, preserve_index=False)  # NaN of pandas as null
    assert table["bmi"].null_count
    np.testing.assert_array_equal(again.predict(table), model.predict(frame))
    model.save_native(str(tmp_path / "plain.txt"))
    plain = lightgbm.Booster(model_file=str(tmp_path / "plain.txt"))
    np.testing.assert_array_equal(plain.predict(frame[names].to_numpy(np.float32)), model.predict(frame))
    with pytest.raises(BadSetting, match="LightGBM predicts on the CPU"):
        model.model.predict(frame, device="cuda")
    engine = model.model.engine
    with pytest.raises(ModelError, match="takes 10 features, and was given 2"):
        engine.call({"features": np.zeros((3, 2), np.float32)}, ["prediction"])
    with pytest.raises(ModelError, match=r"model\.txt is no model"):
        type(engine).restore(bytearray(b"tree\nnonsense"), {}, b"")


def test_features_of_one_array_column_and_of_integers() -> None:
    draw = np.random.default_rng(0)
    values = draw.integers(0, 9, (200, 3))
    frame = pd.DataFrame({"v": list(values), "y": values[:, 0] + 0.5 * values[:, 1]})
    model = LightGBMRegressor(feature_cols="v", label_cols="y", categorical_features=[2], **HERE).fit(frame)
    assert list(model.feature_importances()) == ["v_0", "v_1", "v_2"]
    data = lightgbm.Dataset(values.astype(np.float32), frame.y, categorical_feature=[2])
    plain, _ = trained({"objective": "regression"}, data)
    np.testing.assert_array_equal(model.predict(frame), plain.predict(values.astype(np.float32)))


def test_a_training_that_finds_no_split_ends_with_the_average() -> None:
    frame = pd.DataFrame({"x": np.zeros(50), "y": np.arange(50.0)})
    model = LightGBMRegressor(feature_cols=["x"], label_cols="y", **HERE).fit(frame)
    assert [(entry["iteration"], entry["trees"]) for entry in model.history] == [(i, 1) for i in range(1, 13)]
    assert model.history[-1]["l2"] == pytest.approx(np.var(frame.y))
    assert model.predict(frame).tolist() == [24.5] * 50


@pytest.mark.parametrize(
    "params",
    [
        {"feature_fraction": 0.2, "min_gain_to_split": 5},
        {"bagging_fraction": 0.05, "bagging_freq": 1, "min_data_in_leaf": 15},
    ],
)
def test_an_iteration_that_finds_no_split_is_skipped(params: dict[str, Any]) -> None:
    x, y, frame = few_splits()
    own = {name: value for name, value in params.items() if name != "min_gain_to_split"}
    native = {"num_threads": 1, **{name: params[name] for name in params if name not in own}}
    settings: dict[str, Any] = HERE | own | {"num_iterations": 100, "native_params": native}
    model = LightGBMRegressor(feature_cols="v", label_cols="y", metrics="rmse", **settings).fit(frame)
    plain = lightgbm.train({**PLAIN, "objective": "regression", **params}, lightgbm.Dataset(x, y), 100)
    np.testing.assert_array_equal(model.predict(frame), plain.predict(x))
    trees = [entry["trees"] for entry in model.history]
    assert len(trees) == 100 > trees[-1] == plain.num_trees() > 20
    assert model.history[-1]["rmse"] == pytest.approx(np.sqrt(((plain.predict(x) - y) ** 2).mean()), rel=1e-6)


def test_the_best_iteration_is_one_of_the_history_where_some_added_no_tree() -> None:
    _, y, frame = few_splits()
    settings: dict[str, Any] = HERE | {"feature_fraction": 0.2, "num_iterations": 60, "validation": frame[400:]}
    settings |= {"native_params": {"min_gain_to_split": 5, "num_threads": 1}, "feature_cols": "v", "label_cols": "y"}

    def predicted(**more: Any) -> tuple[LightGBMModel, float]:
        model = LightGBMRegressor(**settings, **more).fit(frame[:400])
        return model, ((model.predict(frame[400:]) - y[400:]) ** 2).mean()

    model, loss = predicted(early_stopping=6)
    losses = [entry["validation_l2"] for entry in model.history]
    best = int(np.argmin(losses))
    assert loss == pytest.approx(losses[best], rel=1e-6)
    assert model.booster().num_trees() == model.history[best]["trees"] < best + 1

    def ends(env: Any) -> None:
        if env.iteration == 55:
            raise EarlyStopException(50, env.evaluation_result_list)

    model, loss = predicted(callbacks=[ends])
    assert loss == pytest.approx(model.history[50]["validation_l2"], rel=1e-6)
    assert model.booster().num_trees() == model.history[50]["trees"] < 51


def test_a_training_that_added_no_tree_for_a_while_continues(tmp_path: Path) -> None:
    _, y, frame = few_splits()
    settings: dict[str, Any] = HERE | {"feature_fraction": 0.2, "run_dir": str(tmp_path), "feature_cols": "v"}
    settings |= {"native_params": {"min_gain_to_split": 5, "num_threads": 1}, "label_cols": "y"}
    for iterations in (50, 80):
        model = LightGBMRegressor(**settings | {"num_iterations": iterations}).fit(frame)
        assert [entry["iteration"] for entry in model.history] == list(range(1, iterations + 1))
        assert model.history[-1]["trees"] == model.booster().num_trees() < iterations
        assert model.history[-1]["l2"] == pytest.approx(((model.predict(frame) - y) ** 2).mean(), rel=1e-6)


def test_trees_of_a_forest_that_find_no_split_are_told(tmp_path: Path) -> None:
    frame = few_splits()[2]
    settings: dict[str, Any] = HERE | {
        "boosting": "rf",
        "bagging_fraction": 0.5,
        "bagging_freq": 1,
        "run_dir": str(tmp_path),
    }
    settings |= {"feature_cols": "v", "label_cols": "y", "feature_fraction": 0.2}
    native = {"num_threads": 1, "min_gain_to_split": 100}
    model = LightGBMRegressor(**settings | {"native_params": native}).fit(frame)
    empty = model.booster().model_to_string().count("\nnum_leaves=1\n")
    (report,) = (json.loads(path.read_text()) for path in tmp_path.rglob("report.json"))
    assert 0 < empty < 12
    assert any(note.startswith(f"{empty} of 12 trees of this forest found no split.") for note in report["notes"])


def few_splits() -> tuple[np.ndarray, np.ndarray, pd.DataFrame]:
    """Return 600 rows of 10 features, of which two decide the label."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(600, 10)).astype(np.float32)
    y = 2 * x[:, 0] + x[:, 1] + draw.normal(size=600) * 0.1
    return x, y, pd.DataFrame({"v": list(x), "y": y})


def test_labels_and_rows_to_validate_on_that_do_not_fit() -> None:
    frame = pd.DataFrame({"x": np.arange(20.0), "c": np.arange(20) % 2})
    settings: dict[str, Any] = {"feature_cols": ["x"], "label_cols": "c", **HERE}
    with pytest.raises(BadData, match="holds 2 in the validation rows, and there are 2 classes"):
        LightGBMClassifier(**settings, validation=frame.assign(c=2)).fit(frame)
    with pytest.raises(EmptyShard, match="There are no rows to validate on"):
        LightGBMClassifier(**settings, validation=frame[:0]).fit(frame)
