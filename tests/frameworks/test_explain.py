"""`tr.explain` against shap's own explainers, the weights of a linear model, and scikit-learn's importances."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.sql import functions as F
from sklearn.inspection import permutation_importance
from sklearn.metrics import mean_absolute_error

import tritium as tr
from tritium.errors import BadData, BadSetting, SignatureMismatch
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature

HOURS = Path(__file__).parents[2] / "examples" / "bike-sharing" / "hour.csv"
FEATURES = ["hr", "temp", "hum", "workingday", "windspeed"]
QUIET = {"verbose": -1, "num_threads": 1, "seed": 1, "deterministic": True}


@pytest.fixture(scope="module")
def hours() -> pd.DataFrame:
    return pd.read_csv(HOURS)[[*FEATURES, "cnt"]].astype("float64")


def booster(hours: pd.DataFrame, label: Any, **params: Any) -> lightgbm.Booster:
    data = lightgbm.Dataset(hours[FEATURES], label)
    return lightgbm.train({**QUIET, **params}, data, num_boost_round=20)


def model_of(trained: lightgbm.Booster, shape: tuple[int, ...] = (), **more: Any) -> tr.Model:
    features = Input("features", tuple(FEATURES), "float64", (len(FEATURES),))
    return tr.Model(trained, Signature((features,), (Output("prediction", "float64", shape),), **more))


@pytest.fixture(scope="module")
def regression(hours: pd.DataFrame) -> tr.Model:
    return model_of(booster(hours, hours["cnt"], objective="regression"), task="regression")


def test_trees_as_shap_explains_them(spark: Any, hours: pd.DataFrame, regression: tr.Model, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Matplotlib, for shap
        import shap

    some = hours.head(500)
    df = spark.createDataFrame(some.reset_index()).repartition(3)
    explained = tr.explain(regression, regression.transform(df))
    rows = explained.df.toPandas().sort_values("index")
    values = np.array([list(row.values()) for row in rows["shap"]])
    oracle = shap.TreeExplainer(regression.module)
    np.testing.assert_allclose(values, oracle.shap_values(some[FEATURES]), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(rows["shap_base"], float(np.squeeze(oracle.expected_value)), rtol=1e-9)
    np.testing.assert_allclose(rows["shap_base"] + values.sum(axis=1), rows["prediction"], rtol=1e-9)
    assert explained.df.schema["shap"].dataType.names == FEATURES
    importances = explained.importances()
    sizes = dict(zip(FEATURES, np.abs(values).mean(axis=0), strict=True))
    assert importances == pytest.approx(sizes)
    assert list(importances) == sorted(sizes, key=lambda name: -sizes[name])
    here = tr.explain(regression, some)
    assert here.df["shap"][0] == pytest.approx(dict(zip(FEATURES, values[0], strict=True)))
    assert here.importances() == pytest.approx(importances)
    explained.plot(str(tmp_path / "shap.png"))
    assert (tmp_path / "shap.png").read_bytes()[:4] == b"\x89PNG"


def test_trees_that_classify(spark: Any, hours: pd.DataFrame) -> None:
    some = hours.head(50)
    two = model_of(booster(hours, hours["cnt"] > 150, objective="binary"), task="classification", activation="none")
    rows = tr.explain(two, spark.createDataFrame(some)).df.toPandas()
    raw = two.module.predict(some[FEATURES], raw_score=True)
    np.testing.assert_allclose(rows["shap_base"] + [sum(row.values()) for row in rows["shap"]], raw, rtol=1e-9)
    kinds = np.minimum(hours["cnt"] // 150, 2)
    three = model_of(
        booster(hours, kinds, objective="multiclass", num_class=3), (3,), task="classification", activation="none"
    )
    explained = tr.explain(three, spark.createDataFrame(some))
    rows = explained.df.toPandas()
    sums = np.array(
        [
            np.add(base, np.sum(list(row.values()), axis=0))
            for base, row in zip(rows["shap_base"], rows["shap"], strict=True)
        ]
    )
    np.testing.assert_allclose(sums, three.module.predict(some[FEATURES], raw_score=True), rtol=1e-9)
    assert tr.explain(three, some).importances() == pytest.approx(explained.importances())


@pytest.mark.parametrize("kind", ["kernel", "gradient"])
def test_a_linear_module(spark: Any, kind: Any) -> None:
    random = np.random.default_rng(0)
    rows = pd.DataFrame(random.normal(size=(30, 3)), columns=["a", "b", "c"]).astype("float32")
    net = torch.nn.Linear(3, 1)
    model = TorchModel(tr.Model(net, example=rows))
    df = spark.createDataFrame(rows.reset_index())
    explained = tr.explain(model, df, explainer=kind, background=rows, samples=2000)
    found = explained.df.toPandas().sort_values("index")
    weights = net.weight.detach().numpy()[0]
    expected = weights * (rows.to_numpy() - rows.to_numpy().mean(axis=0))
    tolerance = 1e-5 if kind == "kernel" else 0.1
    np.testing.assert_allclose([list(row.values()) for row in found["shap"]], expected, atol=tolerance)
    np.testing.assert_allclose(found["shap_base"], net(torch.tensor(rows.to_numpy())).mean().item(), atol=1e-5)
    again = tr.explain(model, df, explainer=kind, background=rows, samples=2000)
    assert again.df.toPandas().sort_values("index")["shap"].tolist() == found["shap"].tolist()


def test_kernel_of_a_classification_with_words(spark: Any) -> None:
    rows = pd.DataFrame({"a": [0.0, 1.0, 2.0, 3.0], "b": [1.0, 0.0, 1.0, 0.0]})
    model = tr.Model(torch.nn.Linear(2, 2), example=rows, task="classification")
    found = tr.explain(model, spark.createDataFrame(rows), on_error="null").df.toPandas()
    expected = model.predict(rows)
    assert isinstance(expected, dict)
    np.testing.assert_allclose(
        found["shap_base"] + [sum(row.values()) for row in found["shap"]], expected["probability"][:, 1], atol=1e-6
    )


def test_permutations_as_scikit_learn_has_them(
    spark: Any, hours: pd.DataFrame, regression: tr.Model, tmp_path: Path
) -> None:
    class Fitted:
        def fit(self) -> None: ...

        def predict(self, x: Any) -> Any:
            return regression.module.predict(x)

    def scored(fitted: Any, x: Any, y: Any) -> float:
        return -float(np.sqrt(np.mean((fitted.predict(x) - y) ** 2)))

    oracle = permutation_importance(
        Fitted(), hours[FEATURES], hours["cnt"], scoring=scored, n_repeats=3, random_state=0
    )
    df = spark.createDataFrame(hours.sort_values("hr"))  # in an order that means something
    found = tr.explain(regression, df, method="permutation", label_col="cnt", repeats=3)
    assert found.metric == "rmse"
    assert found.baseline == pytest.approx(-scored(Fitted(), hours[FEATURES], hours["cnt"]), rel=1e-6)
    for name, mean in zip(FEATURES, oracle.importances_mean, strict=True):
        assert found.mean[name] == pytest.approx(mean, rel=0.05, abs=0.5)
    assert list(found.mean)[:2] == [FEATURES[i] for i in np.argsort(-oracle.importances_mean)[:2]]
    assert all(0 < deviation < 3 for deviation in found.std.values())
    again = tr.explain(regression, df, method="permutation", label_col="cnt", repeats=3)
    assert again == found
    found.plot(str(tmp_path / "importances.svg"))
    assert "<svg" in (tmp_path / "importances.svg").read_text()


def test_metrics(spark: Any, hours: pd.DataFrame, regression: tr.Model) -> None:
    df = spark.createDataFrame(hours.head(1000))
    evaluator = RegressionEvaluator(labelCol="label", predictionCol="bikes", metricName="r2")
    by_evaluator = tr.explain(regression, df, method="permutation", label_col="cnt", metric=evaluator, repeats=1)
    assert by_evaluator.metric == "r2"
    assert by_evaluator.mean["hr"] > 0.1
    by_function = tr.explain(
        regression,
        df,
        method="permutation",
        label_col="cnt",
        metric=mean_absolute_error,
        larger_is_better=False,
        repeats=1,
    )
    predictions = regression.module.predict(hours.head(1000)[FEATURES])
    assert by_function.baseline == pytest.approx(mean_absolute_error(hours["cnt"].head(1000), predictions))
    assert by_function.mean["hr"] > 10
    two = model_of(
        booster(hours, hours["cnt"] > 150, objective="binary"), task="classification", activation="none",
        label_words={"busy": ["no", "yes"]},
    )  # fmt: skip
    words = df.withColumn("busy", F.when(F.col("cnt") > 150, "yes").otherwise("no"))
    for metric in ("accuracy", "areaUnderROC", "logLoss"):
        found = tr.explain(two, words, method="permutation", label_col="busy", metric=metric, repeats=1)
        assert found.mean["hr"] > 0.05


def test_an_image_is_one_feature(spark: Any) -> None:
    class Mean(torch.nn.Module):
        def forward(self, image: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return image.mean((1, 2)) + n.float()

    rows = {"image": np.random.default_rng(0).random((40, 2, 3), np.float32), "n": np.arange(40) % 2}
    model = tr.Model(Mean(), example=rows)
    table = [
        (image.tolist(), int(n), float(image.mean() + n)) for image, n in zip(rows["image"], rows["n"], strict=True)
    ]
    df = spark.createDataFrame(table, "image array<array<float>>, n long, y double")
    found = tr.explain(model, df, method="permutation", label_col="y")
    assert set(found.mean) == {"image", "n"}
    assert found.baseline == pytest.approx(0, abs=1e-5)
    assert found.mean["n"] > found.mean["image"] > 0


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"method": "lime"}, BadSetting, "method='lime'"),
        ({"explainer": "gradient"}, BadSetting, "takes a model of torch"),
        ({"explainer": "exact"}, BadSetting, "explainer='exact'"),
        ({"method": "permutation"}, BadData, "label_col=None"),
        ({"method": "permutation", "label_col": "cn"}, BadData, "Did you mean 'cnt'"),
        ({"method": "permutation", "label_col": "cnt", "metric": "rsme"}, BadSetting, "Did you mean 'rmse'"),
        ({"method": "permutation", "label_col": "cnt", "metric": 3}, BadSetting, "metric=3"),
        ({"method": "permutation", "label_col": "cnt", "repeats": 0}, BadSetting, "repeats=0"),
        ({"method": "permutation", "label_col": "cnt", "on_error": "null"}, BadSetting, "takes no on_error="),
    ],
)
def test_bad_input(spark: Any, hours: pd.DataFrame, regression: tr.Model, settings: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        tr.explain(regression, spark.createDataFrame(hours.head(5)), **settings)


def test_other_bad_input(spark: Any, hours: pd.DataFrame, regression: tr.Model) -> None:
    with pytest.raises(SignatureMismatch, match="missing column 'hum'"):
        tr.explain(regression, spark.createDataFrame(hours.head(5).drop(columns="hum")))
    with pytest.raises(BadSetting, match=r"takes a tr\.Model"):
        tr.explain(regression.module, hours)
    with pytest.raises(BadData, match="of Spark, and no stream"):
        tr.explain(regression, hours, method="permutation", label_col="cnt")
    wide = tr.Model(torch.nn.Linear(3000, 1), example={"x": np.zeros((2, 3000), np.float32)})
    with pytest.raises(BadSetting, match="up to 2,000 numbers a row"):
        tr.explain(wide, hours)
