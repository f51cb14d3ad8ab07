"""`explain`: which features a model's predictions depend on (driver)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tritium.data.types import is_spark, spark_column
from tritium.errors import BadData, BadSetting
from tritium.hints import suggest
from tritium.model.model import Model
from tritium.model.rows import arrays
from tritium.model.signature import Output, Signature, names_of_numbers
from tritium.predict.explained import Permuted, Shap
from tritium.spark import is_connect

_BACKGROUND = 100
_MOST_FEATURES = 2_000  # A column of SHAP values has a field for each.
_PERMUTED_ROWS = 10_000  # Rows among which a value is permuted: as many as Spark gives a function at once.


def explain(
    model: Any,
    df: Any,
    *,
    method: Literal["shap", "permutation"] = "shap",
    explainer: Literal["auto", "tree", "kernel", "gradient"] = "auto",
    background: Any = None,
    samples: int | None = None,
    label_col: str | None = None,
    metric: Any = None,
    larger_is_better: bool | None = None,
    repeats: int = 5,
    seed: int = 0,
    batch_size: int = 1024,
    **params: Any,
) -> ShapValues | Importances:
    """Explain the predictions of a model: each row's by SHAP values, or all together by permutation importance.

    model            : a `tr.Model`, or its transformer.
    df               : Spark's DataFrame, for SHAP also a stream or one of pandas.
    method           : "shap": what each feature adds to the prediction of a row. "permutation": how much worse `metric`
                       becomes when a feature's values are permuted.
    explainer        : of SHAP. "tree": exact, by LightGBM itself. "kernel": any model, by the package shap. "gradient":
                       a torch module, by shap; an estimate for its raw output. "auto": "tree" for LightGBM, else
                       "kernel".
    background       : rows that stand for the data, for "kernel" and "gradient": a DataFrame. None: 100 rows of `df`.
    samples          : evaluations a row, of "kernel" and "gradient", as shap's `nsamples`. None: by its rule, or 200.
    label_col        : for "permutation": the column of the label.
    metric           : for "permutation": an evaluator of Spark ML, the name of a metric of one ("rmse", "r2",
                       "accuracy", "areaUnderROC"), or a function (labels, predictions) -> float of arrays `[rows]`.
                       None: "accuracy" for a classification, else "rmse".
    larger_is_better : of a function, whose importances are negative otherwise. None: True.
    repeats          : permutations of each feature.
    seed             : of the permutations and samples.
    batch_size       : rows that the model is called with at once.
    params           : for "shap": parameters of the transformer, `on_error="null"`, say.

    Raises BadSetting and BadData before a job starts, and SignatureMismatch.
    """
    model = getattr(model, "model", model)
    if not isinstance(model, Model):
        raise BadSetting(f"explain takes a tr.Model or its transformer, and got a {type(model).__name__}.")
    _check_outputs(model.signature)
    if method == "shap":
        return _shap(model, df, explainer, background, samples, seed, batch_size, params)
    if method != "permutation":
        raise BadSetting(f"method={method!r}: it is 'shap' or 'permutation'.", setting="method")
    if params:
        raise BadSetting(f"method='permutation' takes no {', '.join(params)}=.", settings=list(params))
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise BadSetting(f"repeats={repeats!r}: it is a whole number of at least 1.", setting="repeats")
    return _permutation(model, df, label_col, metric, larger_is_better is not False, repeats, seed, batch_size)


@dataclass(frozen=True)
class ShapValues:
    """The SHAP values of a DataFrame's rows.

    df       : the rows with a column `shap`, a struct with a number for each feature, and `shap_base`. The base and all
               contributions together are the prediction: for "tree" and a classification, the raw score (log-odds).
               Of several classes each is an array, with a value a class.
    features : the names of the features.
    """

    df: Any
    features: tuple[str, ...]

    def importances(self) -> dict[str, float]:
        """Return feature → the mean of its absolute contributions, largest first. Runs a Spark job."""
        if not is_spark(self.df):
            means = {n: float(np.mean([np.sum(np.abs(row[n])) for row in self.df["shap"]])) for n in self.features}
        else:
            from pyspark.sql import functions as F
            from pyspark.sql.types import ArrayType

            many = isinstance(self.df.schema["shap"].dataType.fields[0].dataType, ArrayType)
            values = (F.col("shap").getField(name) for name in self.features)
            sizes = (F.aggregate(v, F.lit(0.0), lambda s, x: s + F.abs(x)) if many else F.abs(v) for v in values)
            row = self.df.select(*(F.avg(size).alias(f"f{i}") for i, size in enumerate(sizes))).first()
            means = dict(zip(self.features, map(float, row), strict=True))
        return dict(sorted(means.items(), key=lambda pair: -pair[1]))

    def plot(self, path: str) -> None:
        """Write a bar chart of the importances to a file: "shap.png", "shap.svg"."""
        _bars(path, self.importances(), {}, "mean |SHAP value|")


@dataclass(frozen=True)
class Importances:
    """The permutation importances of features, largest first.

    mean, std : feature → mean and standard deviation of the importance over the repeats, in units of the metric: by how
                much the metric is worse than `baseline`, that of the rows as they are.
    """

    metric: str
    baseline: float
    mean: dict[str, float]
    std: dict[str, float]

    def plot(self, path: str) -> None:
        """Write a bar chart of the importances, with their deviations, to a file."""
        _bars(path, self.mean, self.std, f"{self.metric} is worse by")


def _bars(path: str, means: Mapping[str, float], deviations: Mapping[str, float], title: str) -> None:
    from matplotlib.figure import Figure

    names = list(means)[:20][::-1]
    figure = Figure(figsize=(7, 1 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    errors = [deviations[name] for name in names] if deviations else None
    axes.barh(names, [means[name] for name in names], xerr=errors)
    axes.set_xlabel(title)
    figure.savefig(path)


def _check_outputs(signature: Signature) -> None:
    if len(signature.outputs) != 1 or len(signature.outputs[0].shape) > 1:
        raise BadSetting("explain takes a model that returns one number a row, or one for each of several classes.")


def _explaining(model: Model, state: Permuted | Shap, outputs: list[Output]) -> Model:
    """Return a model with the same inputs whose predictions explain those of `model`."""
    signature = Signature(model.signature.inputs, tuple(outputs))
    return Model(state, signature, engine="function", decode=model.decode)


def _shap(
    model: Model, df: Any, explainer: str, background: Any, samples: Any, seed: int, batch_size: int, params: Any
) -> ShapValues:
    native = model.engine.explainer
    kind = ("tree" if native == "tree" else "kernel") if explainer == "auto" else explainer
    if kind not in ("tree", "kernel", "gradient"):
        raise BadSetting(f"explainer={explainer!r}: it is 'auto', 'tree', 'kernel' or 'gradient'.", setting="explainer")
    if kind not in ("kernel", native):
        takes = "LightGBM" if kind == "tree" else "torch"
        raise BadSetting(
            f"explainer={kind!r} takes a model of {takes}, and this is one of {model.engine.name}. 'kernel' takes any.",
            setting="explainer",
        )
    features = _names(model.signature)
    rows = None if kind == "tree" else _background(model, df, background, seed)
    parts = vars(Shap.of(model, batch_size))
    state = Shap(**parts | {"kind": kind, "background": rows, "samples": samples, "seed": seed})
    k = _explained_outputs(model, kind)
    outputs = [Output("shap", "float64", (len(features), *k)), Output("base", "float64", k)]
    explaining = _explaining(model, state, outputs)
    transformer = explaining.transformer(output_cols=["shap", "shap_base"], **params)
    scored = transformer.transform(df)
    if not is_spark(df):
        named = [None if row is None else dict(zip(features, row, strict=True)) for row in scored["shap"]]
        return ShapValues(scored.assign(shap=named), features)
    from pyspark.sql import functions as F

    fields = F.struct(*(F.get("shap", F.lit(i)).alias(name) for i, name in enumerate(features)))
    return ShapValues(scored.withColumn("shap", F.when(F.col("shap").isNotNull(), fields)), features)


def _explained_outputs(model: Model, kind: str) -> tuple[int, ...]:
    """Return the shape of what is explained of a row: () for one number, (k,) for k classes."""
    output, classes = model.signature.outputs[0], model.signature.task == "classification"
    if kind == "tree":
        k = int(model.module.num_model_per_iteration())
        return () if k == 1 else (k,)
    k = 1 if output.scalar else int(output.shape[0] or 0)
    return () if k == 1 or (classes and k == 2 and kind == "kernel") else (k,)


def _names(signature: Signature) -> tuple[str, ...]:
    names: list[str] = []
    for taken in signature.inputs:
        width = math.prod(n or 0 for n in taken.shape)
        if None in taken.shape or len(names) + width > _MOST_FEATURES:
            raise BadSetting(
                f"SHAP values are computed for up to {_MOST_FEATURES:,} numbers a row, and input {taken.name!r} has "
                f"{list(taken.shape)}. method='permutation' permutes such an input as a whole."
            )
        names += names_of_numbers(taken.columns, width, taken.codec.get("slots", ()))
    return tuple(names)


def _background(model: Model, df: Any, background: Any, seed: int) -> dict[str, Any]:
    """Return the rows of the background as inputs of the model."""
    frame = df if background is None else background
    if is_spark(frame):
        if frame.isStreaming:
            raise BadSetting("A stream has no rows that stand for the data: give background=, a DataFrame.")
        from pyspark.sql import functions as F

        columns = [spark_column(frame.schema, name).alias(name) for name in model.signature.columns]
        some = frame if background is not None else frame.orderBy(F.rand(seed)).limit(_BACKGROUND)
        frame = some.select(*columns).toPandas()
    elif background is None:
        frame = frame.sample(min(_BACKGROUND, len(frame)), random_state=seed)
    rows, _ = arrays(model.signature, frame, model.decode)
    if not len(next(iter(rows.values()))):
        raise BadData("The background has no rows.")
    return dict(rows)


def _permutation(
    model: Model, df: Any, label_col: str | None, metric: Any, larger: bool, repeats: int, seed: int, batch_size: int
) -> Importances:
    classes = model.signature.task == "classification"
    if not classes and not model.signature.outputs[0].scalar:
        raise BadSetting("method='permutation' takes a model of one number a row, or a classification.")
    if not is_spark(df) or df.isStreaming:
        raise BadData("method='permutation' takes a DataFrame of Spark, and no stream.")
    if label_col is None or label_col not in df.columns:
        where = "" if label_col is None else suggest(label_col, df.columns)
        raise BadData(f"label_col={label_col!r}: name the column of the label.{where}", column=label_col)
    evaluate, metric_name, larger = _metric(metric or ("accuracy" if classes else "rmse"), larger)
    parts = vars(Permuted.of(model, batch_size))
    state = Permuted(**parts | {"repeats": repeats, "seed": seed})
    names = [name for name, _, _ in state.features()]
    values = [evaluate(rows, classes) for rows in _permuted(model, df, label_col, state, 1 + len(names) * repeats)]
    baseline = values[0]
    worse = [(baseline - value) if larger else (value - baseline) for value in values[1:]]
    of_feature = {name: worse[i * repeats : (i + 1) * repeats] for i, name in enumerate(names)}
    mean = {name: float(np.mean(numbers)) for name, numbers in of_feature.items()}
    mean = dict(sorted(mean.items(), key=lambda pair: -pair[1]))
    return Importances(metric_name, float(baseline), mean, {name: float(np.std(of_feature[name])) for name in mean})


def _permuted(model: Model, df: Any, label_col: str, state: Permuted, count: int) -> Iterator[Any]:
    """Yield DataFrames of `_label` and `_p`: of the rows as they are, and of each permutation. One job scores all."""
    from pyspark.sql import functions as F

    output = model.signature.outputs[0]
    classes = () if model.signature.task != "classification" else (2 if output.scalar else output.shape[0],)
    explaining = _explaining(model, state, [Output("predictions", "float64", (count, *classes))])
    needed = [spark_column(df.schema, name).alias(name) for name in model.signature.columns]
    rows = df.select(*needed, _label(model.signature, df, label_col).alias("_label"), F.rand(state.seed).alias("_r"))
    partitions = [] if is_connect(df.sparkSession) else [df.sparkSession.sparkContext.defaultParallelism]
    # Values are permuted among rows that come together, so rows must not come in an order that means something.
    rows = rows.repartition(*partitions, "_r").sortWithinPartitions("_r").drop("_r")
    transformer = explaining.transformer(output_cols=["_predictions"], batch_size=_PERMUTED_ROWS)
    scored = transformer.transform(rows).select("_label", "_predictions").persist()
    try:
        for number in range(count):
            yield scored.select("_label", F.get("_predictions", F.lit(number)).alias("_p"))
    finally:
        scored.unpersist()


def _label(signature: Signature, df: Any, label_col: str) -> Any:
    """Return the label as a double: of a label of words its index."""
    from pyspark.sql import functions as F

    label = spark_column(df.schema, label_col)
    words = signature.label_words.get(label_col)
    if words is None:
        return label.cast("double")
    return F.array_position(F.lit(list(words)), label).cast("double") - 1


def _metric(metric: Any, larger: bool) -> tuple[Callable[[Any, bool], float], str, bool]:
    """Return the function that evaluates a DataFrame of `_label` and `_p`, its name, and whether larger is better."""
    from pyspark.ml.evaluation import Evaluator

    metric = _evaluator(metric) if isinstance(metric, str) else metric
    if isinstance(metric, Evaluator):
        evaluator: Any = metric

        def by_evaluator(rows: Any, classes: bool) -> float:
            by_role = _columns(classes)
            params = (p for p in evaluator.params if p.name.endswith("Col") and evaluator.isDefined(p))
            names = {p.name.removesuffix("Col"): evaluator.getOrDefault(p) for p in params}
            columns = [by_role[role].alias(name) for role, name in names.items() if role in by_role]
            return float(evaluator.evaluate(rows.select(*columns)))

        return by_evaluator, str(evaluator.getOrDefault("metricName")), bool(evaluator.isLargerBetter())
    if not callable(metric):
        raise BadSetting(f"metric={metric!r}: it is a name, an evaluator of Spark ML or a function.", setting="metric")

    def by_function(rows: Any, classes: bool) -> float:
        by_role = _columns(classes)
        frame = rows.select(by_role["label"].alias("label"), by_role["prediction"].alias("prediction")).toPandas()
        return float(metric(frame["label"].to_numpy(), frame["prediction"].to_numpy()))

    return by_function, getattr(metric, "__name__", "metric"), larger


def _evaluator(name: str) -> Any:
    """Return Spark ML's evaluator that has a metric of this name. Raises BadSetting where none has."""
    from pyspark.ml.evaluation import (
        BinaryClassificationEvaluator,
        MulticlassClassificationEvaluator,
        RegressionEvaluator,
    )

    kinds: dict[Any, tuple[str, ...]] = {
        RegressionEvaluator: ("rmse", "mse", "r2", "mae", "var"),
        BinaryClassificationEvaluator: ("areaUnderROC", "areaUnderPR"),
        MulticlassClassificationEvaluator: ("accuracy", "f1", "weightedPrecision", "weightedRecall", "logLoss"),
    }
    for kind, names in kinds.items():
        if name in names:
            return kind(metricName=name)
    known = [metric for names in kinds.values() for metric in names]
    raise BadSetting(f"metric={name!r} is no metric of Spark ML's evaluators.{suggest(name, known)}", setting="metric")


def _columns(classes: bool) -> dict[str, Any]:
    """Return role in an evaluator → column, of a DataFrame of `_label` and `_p`, a number or probabilities."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    if not classes:
        return {"label": F.col("_label"), "prediction": F.col("_p")}
    scores = array_to_vector(F.col("_p"))
    prediction = F.array_position("_p", F.array_max("_p")).cast("double") - 1
    return {"label": F.col("_label"), "prediction": prediction, "probability": scores, "rawPrediction": scores}
