"""Errors of the settings of LightGBM, as sentences (any process)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tritium.arguments import argument_names, name_of, takes
from tritium.ml.early_stopping import EarlyStopping
from tritium.ml.fields import is_names, is_number, is_whole
from tritium.ml.lightgbm.names import is_larger_better

_FRACTIONS = ("feature_fraction", "bagging_fraction")
_EXACT = 1 << 24
LEAST = {"num_iterations": 1, "num_leaves": 2, "min_data_in_leaf": 0, "bagging_freq": 0, "max_bin": 2}
"""Setting → the least value it may have."""
_NOT_TAKEN = {
    "_EarlyStoppingCallback": "early_stopping, whose state a retry would lose. Give the setting early_stopping=.",
    "_RecordEvaluationCallback": "record_evaluation, whose dict is filled on the ranks. Read model.history instead.",
}


def column_problems(settings: Any) -> Iterator[str]:
    """Yield a sentence for each error of the columns."""
    features = settings.feature_cols
    if isinstance(features, Mapping):
        yield "feature_cols is a mapping; LightGBM takes one input: a list of scalar columns, or a vector column."
        return
    if not isinstance(features, str) and len(set(features)) < len(features):
        yield f"feature_cols={list(features)!r} names a column twice."
    if settings.decode:
        yield (
            f"decode={list(settings.decode)!r}: LightGBM takes numbers as the DataFrame has them. Make them of the "
            "column before, as an array or a vector, by a UDF in Spark."
        )
    buckets = settings.hash_buckets if isinstance(settings.hash_buckets, Mapping) else {}
    wide = [name for name, count in buckets.items() if is_whole(count, _EXACT + 1)]
    if wide and settings.feature_dtype == "float32":
        shown = f"hash_buckets={{{wide[0]!r}: {buckets[wide[0]]}}}"
        yield f"{shown} is more than float32 tells apart. Give at most {_EXACT}."
    if isinstance(settings.label_cols, Mapping) or len(settings.labels()) != 1:
        yield f"label_cols={settings.label_cols!r} must be one column."
    for name in ("categorical_features", "monotone_constraints"):
        names = getattr(settings, name) or ()
        kinds = list if name == "categorical_features" else Mapping
        if not isinstance(names, (kinds, tuple)):
            yield f"{name}={names!r} must be a {'list of' if kinds is list else 'mapping from'} feature columns."
        elif not is_one(features) and (wrong := [key for key in names if key not in features]):
            yield f"{name} names {wrong[0]!r}, which is not among feature_cols."
    constraints = settings.monotone_constraints or {}
    if isinstance(constraints, Mapping) and not set(constraints.values()) <= {-1, 0, 1}:
        yield f"monotone_constraints={dict(constraints)!r}: each must be -1, 0 or 1."
    scores = settings.init_score_col
    if scores is not None and not is_names(scores):
        yield f"init_score_col={scores!r} must be a column, or a list of columns."
    elif scores is not None and not settings.is_by_class() and not is_one(scores):
        yield f"init_score_col={scores!r} names {len(scores)} columns; several are for several classes."


def is_one(columns: Any) -> bool:
    """Return whether these are the name of one column, or a list of one."""
    return isinstance(columns, str) or len(columns) == 1


def callback_problems(callbacks: Any) -> Iterator[str]:
    """Yield a sentence for each error of a list of LightGBM's callbacks."""
    if not isinstance(callbacks, list | tuple):
        yield f"callbacks={name_of(callbacks)} must be a list: callbacks=[…]."
        return
    for callback in callbacks:
        name = name_of(callback)
        if name in _NOT_TAKEN:
            yield f"callbacks has a lightgbm.{_NOT_TAKEN[name]}"
        elif isinstance(callback, type):
            yield f"the callback {name} is a class; give an instance, {name}()."
        elif not callable(callback):
            yield f"the callback {callback!r:.80} can't be called; LightGBM's are functions of a CallbackEnv."
        elif not takes(callback, 1):
            arguments = ", ".join(argument_names(callback)) or "nothing"
            yield f"the callback {name} takes {arguments}; it is called with (env), a lightgbm.callback.CallbackEnv."


def number_problems(settings: Any) -> Iterator[str]:
    """Yield a sentence for each error of the numbers."""
    for name, least in LEAST.items():
        if not is_whole(value := getattr(settings, name), least):
            yield f"{name}={value!r} must be a whole number of at least {least}."
    if not is_whole(settings.max_depth, -1):
        yield f"max_depth={settings.max_depth!r} must be a whole number, or -1: any depth."
    for name in ("learning_rate", *_FRACTIONS):
        value = getattr(settings, name)
        if not is_number(value) or not 0 < value <= (1 if name in _FRACTIONS else math.inf):
            yield f"{name}={value!r} must be a number above 0{' and at most 1' if name in _FRACTIONS else ''}."
    for name in ("lambda_l1", "lambda_l2"):
        if not is_number(value := getattr(settings, name)) or value < 0:
            yield f"{name}={value!r} must be a number of at least 0."
    if is_number(settings.bagging_fraction) and settings.bagging_fraction < 1 and settings.bagging_freq == 0:
        yield f"bagging_fraction={settings.bagging_fraction} does nothing with bagging_freq=0. Give bagging_freq=1."


def objective_problems(settings: Any) -> Iterator[str]:
    """Yield a sentence for each error of objective, metrics and early stopping."""
    if settings.objective is not None and settings.objective not in settings.objectives:
        listed = ", ".join(map(repr, settings.objectives))
        yield f"objective={settings.objective!r} is none of those for this estimator: {listed}."
    if settings.metrics is not None and not is_names(settings.metrics):
        yield f"metrics={settings.metrics!r} must be the name of a metric of LightGBM, or a list of names."
        return
    if settings.native_params is not None and not isinstance(settings.native_params, Mapping):
        yield f"native_params={settings.native_params!r} must be a mapping from LightGBM's parameters to values."
    rule = settings.early_stopping
    if rule is None:
        return
    if settings.validation is None and not settings.training_metric:
        yield "early_stopping needs validation=, or training_metric=True."
    if settings.boosting == "dart":
        yield 'early_stopping can\'t restore an earlier model with boosting="dart", which changes the trees before it.'
    if isinstance(rule, EarlyStopping):
        monitor = rule.monitor or ""
        if monitor and not settings.training_metric and not monitor.startswith("validation_"):
            yield (
                f"early_stopping monitors {monitor!r}, of the rows that are trained on, which training_metric=False "
                f"leaves out. Monitor 'validation_{monitor}'."
            )
        watched = (rule.monitor or settings.metric_names()[0]).removeprefix("validation_")
        larger = is_larger_better(watched)
        if (rule.mode == "max") != larger and (rule.monitor is not None or rule.mode == "max"):
            better = "larger" if larger else "smaller"
            yield f"early_stopping has mode={rule.mode!r}, and of {watched!r} a {better} value is the better one."
