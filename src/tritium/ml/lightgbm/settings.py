"""`LightGBMSettings`: what and how to train with LightGBM (any process)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from tritium.errors import BadSetting
from tritium.hints import question
from tritium.ml.early_stopping import EarlyStopping
from tritium.ml.epoch_settings import IterativeSettings
from tritium.ml.fields import is_names, is_number, is_whole, setting
from tritium.ml.lightgbm.names import METRIC_NAMES, OF_LIGHTGBM, OF_OTHERS, OF_SYNAPSEML, is_larger_better
from tritium.ml.settings import LABEL

GROUP, INIT_SCORE = "group", "init_score"
BATCH_SIZE = 16_384  # rows of a call to predict
_FRACTIONS = ("feature_fraction", "bagging_fraction")
_LEAST = {"num_iterations": 1, "num_leaves": 2, "min_data_in_leaf": 0, "bagging_freq": 0, "max_bin": 2}


@dataclass(frozen=True, kw_only=True)
class LightGBMSettings(IterativeSettings):
    """What and how to train with LightGBM, whatever is predicted. Names are LightGBM's own."""

    framework: ClassVar[str] = "lightgbm"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **IterativeSettings.choices,
        "tree_learner": ("data", "voting", "serial"),
        "boosting": ("gbdt", "dart", "rf"),
        "feature_dtype": ("float32", "float64"),
        "training_metric": (True, False),
    }
    whole: ClassVar[tuple[str, ...]] = (*IterativeSettings.whole, *_LEAST, "max_depth")
    hints: ClassVar[Mapping[str, str]] = {
        **IterativeSettings.hints,
        **{name: question(*own) for name, own in {**OF_SYNAPSEML, **OF_OTHERS}.items()},
        **{name: f" Give it to LightGBM by native_params={{{name!r}: …}}." for name in OF_LIGHTGBM},
        "params": " That is what Spark ML calls all settings; LightGBM's other parameters go into native_params=.",
    }
    objectives: ClassVar[tuple[str, ...]] = ()
    """Those that fit what is predicted, the default first."""
    loss_names: ClassVar[tuple[str, ...]] = ()

    num_iterations: int = setting("How many trees are trained (of each class, where there are several).", 100)
    learning_rate: float = setting("The factor by which each tree's outputs are shrunk.", 0.1)
    num_leaves: int = setting("The most leaves that a tree may have.", 31)
    max_depth: int = setting("The greatest depth of a tree; -1: any.", -1)
    min_data_in_leaf: int = setting("The fewest rows, of all ranks, that a leaf may have.", 20)
    feature_fraction: float = setting("The part of the features that each tree is grown from.", 1.0)
    bagging_fraction: float = setting("The part of the rows that trees are grown from, with bagging_freq above 0.", 1.0)
    bagging_freq: int = setting("After how many iterations other rows are drawn; 0: all rows are used.", 0)
    lambda_l1: float = setting("L1 regularization of the leaves.", 0.0)
    lambda_l2: float = setting("L2 regularization of the leaves.", 0.0)
    max_bin: int = setting("The most bins into which the values of a feature are put.", 255)
    boosting: Literal["gbdt", "dart", "rf"] = setting(
        'The kind of boosting: "gbdt", or "dart" and "rf", whose training starts over in a retry.', "gbdt"
    )
    objective: str | None = setting("LightGBM's objective. None: the usual one of this estimator.", None)
    metrics: Any = setting(
        "LightGBM's metrics, a name or a list of names; the first is the one that early stopping looks at. None: that "
        "of the objective.",
        None,
    )
    training_metric: bool = setting("Whether the metrics are also computed of the rows that are trained on.", True)
    tree_learner: Literal["data", "voting", "serial"] = setting(
        'How several ranks train one tree: "data" (histograms of all features are summed), or "voting" (only those of '
        'the features that ranks vote for). "serial" is for one rank.',
        "data",
    )
    categorical_features: Sequence[str | int] = setting(
        "Feature columns whose numbers (whole, from 0) are categories; of a vector or array column the positions in "
        "it. Negative ones are missing.",
        (),
    )
    monotone_constraints: Mapping[Any, int] | None = setting(
        "Feature column (of a vector or array column the position in it) -> 1 where the prediction may only rise with "
        "it, -1 where it may only fall.",
        None,
    )
    init_score_col: Any = setting(
        "A column of scores that the training begins with, in place of the average; for several classes a list of "
        "columns. The model's predictions do not include them.",
        None,
    )
    native_params: Mapping[str, Any] | None = setting(
        "Other parameters of LightGBM, by its own names: {'min_gain_to_split': 0.1}.", None
    )
    feature_dtype: Literal["float32", "float64"] = setting(
        "The numbers in which features are read, in training and prediction.", "float32"
    )
    early_stopping: Any = setting("EarlyStopping(...), or its patience in iterations.", None)
    checkpoint_every: Any = setting(
        "How often the training is saved to the run directory, from which a retry, or a later fit with the same "
        'run_dir, continues: a time ("1min"), a number of iterations, or None: never.',
        "1min",
    )
    if_data_changed: Literal["refuse", "restart"] = setting(
        "When a training continues over other rows than it was begun with: "
        '"refuse", or "restart", which adds trees that are trained on the current rows.',
        "refuse",
    )
    nan: Literal["error", "keep"] = setting(
        'Whether a NaN in a feature is an error, or a missing value ("keep"), in training and prediction.', "keep"
    )
    nulls: Mapping[str, float] | None = setting(
        "Column -> the number in place of a null in it, in training and prediction. A null in any other feature is a "
        "missing value, in any other column an error.",
        None,
    )
    prediction_batch_size: int = setting("Rows that the trained model is called with at once, to predict.", BATCH_SIZE)
    weight_col: str | None = setting("A column of weights of the rows.", None)
    seed: int = setting("Decides LightGBM's random numbers and the validation fraction.", 0)

    def __post_init__(self) -> None:
        columns = self.feature_cols
        columns = list(columns.values()) if isinstance(columns, Mapping) else [columns]
        if self.nan == "keep" and all(map(is_names, columns)) and isinstance(self.nulls or {}, Mapping):
            missing = {name: math.nan for given in columns for name in ([given] if isinstance(given, str) else given)}
            object.__setattr__(self, "nulls", missing | dict(self.nulls or {}))
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong."""
        yield from super().problems()
        yield from _columns(self)
        yield from _numbers(self)
        yield from _objective(self)

    def check_ranks(self, ranks: int) -> None:
        """Raise BadSetting where several ranks would each train a model of their own."""
        if ranks > 1 and self.tree_learner == "serial":
            raise BadSetting(
                f'tree_learner="serial" is for one rank, and there are {ranks}. Use "data" or "voting".',
                setting="tree_learner",
            )
        if ranks > 1 and self.min_data_in_leaf == 0:  # LightGBM 4.7 fails: it estimates the rows of a leaf, as 0
            raise BadSetting(
                f"min_data_in_leaf=0 is for one rank, and there are {ranks}: several grow no leaf without rows. Use 1.",
                setting="min_data_in_leaf",
            )

    @property
    def dtype_of_features(self) -> str:
        """`feature_dtype`, also of integers: a missing value is a NaN."""
        return self.feature_dtype

    def names_of_features(self) -> list[str] | None:
        """Return the feature columns in the order of the model's features; None for one vector or array column."""
        return None if isinstance(self.feature_cols, str) else list(self.feature_cols)

    def given_metrics(self) -> list[str]:
        """Return the names of `metrics` as LightGBM has them in results; none where the objective decides."""
        names = [self.metrics] if isinstance(self.metrics, str) else list(self.metrics or ())
        return [METRIC_NAMES.get(name, name) for name in names]

    def metric_names(self) -> Sequence[str]:
        """Return the names that metrics may have in the history."""
        return self.given_metrics() or self.usual_metrics()

    def usual_metrics(self) -> list[str]:
        """Return the metric of the objective, or of those that may be taken."""
        name = self.objective or self.objectives[0]
        return [METRIC_NAMES.get(name, name)]

    def more_sources(self) -> Mapping[str, tuple[str, str | list[str], str]]:
        """Return the columns of `init_score_col`."""
        given = self.init_score_col
        if given is None:
            return {}
        return {INIT_SCORE: ("init_score", given if isinstance(given, str) else list(given), "float64")}

    def stopping_rule(self) -> EarlyStopping | None:
        """Return the rule for the metric that comes first where `metrics` says which, else that of the objective."""
        return self.rule(self.metric_names())

    def rule(self, metrics: Sequence[str]) -> EarlyStopping | None:
        """Return `early_stopping` with monitor and mode, for the metrics that LightGBM computes; None: never stop."""
        rule = self.early_stopping
        rule = EarlyStopping(patience=rule) if isinstance(rule, int) else rule
        if rule is None or rule.monitor is not None:
            return rule
        prefix = "validation_" if self.validation is not None else ""
        mode: Literal["min", "max"] = "max" if is_larger_better(metrics[0]) else "min"
        return replace(rule, monitor=prefix + metrics[0], mode=mode)


@dataclass(frozen=True, kw_only=True)
class LightGBMClassifierSettings(LightGBMSettings):
    """What and how to train a classifier: every field is also a Spark ML Param of `LightGBMClassifier`."""

    objectives: ClassVar[tuple[str, ...]] = ("binary", "multiclass", "multiclassova")
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**LightGBMSettings.choices, "task": ("classification",)}

    label_cols: Any = setting("The column of the classes: the whole numbers 0, 1, 2, …, as StringIndexer makes them.")
    num_class: int | None = setting("The number of classes. None: as many as the labels of all rows have.", None)
    objective: str | None = setting(
        'LightGBM\'s objective: "binary", "multiclass" or "multiclassova". None: "binary" for two classes, else '
        '"multiclass".',
        None,
    )
    task: Literal["classification"] = setting("What predictions are.", "classification")

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong."""
        yield from super().problems()
        if self.num_class is not None and not is_whole(self.num_class, 2):
            yield f"num_class={self.num_class!r} must be a whole number of at least 2, or None: as the labels have."
        elif self.objective == "binary" and self.num_class not in (None, 2):
            yield f'objective="binary" is for two classes, and num_class={self.num_class}. Use "multiclass".'

    def usual_metrics(self) -> list[str]:
        """Return the metric of the objective, or of those that may be taken."""
        return super().usual_metrics() if self.objective else ["binary_logloss", "multi_logloss"]

    def is_by_class(self) -> bool:
        """Return True: labels are class indices."""
        return True

    def gives_probabilities(self) -> bool:
        """Return True: LightGBM predicts probabilities."""
        return True


@dataclass(frozen=True, kw_only=True)
class LightGBMRegressorSettings(LightGBMSettings):
    """What and how to train a regressor: every field is also a Spark ML Param of `LightGBMRegressor`."""

    objectives: ClassVar[tuple[str, ...]] = (
        *("regression", "regression_l1", "huber", "fair", "poisson", "quantile", "mape", "gamma", "tweedie"),
        *("cross_entropy", "cross_entropy_lambda"),
    )
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**LightGBMSettings.choices, "task": ("regression",)}

    label_cols: Any = setting("The column of the numbers to predict.")
    task: Literal["regression"] = setting("What predictions are.", "regression")

    def is_of_one_score(self, label: str = LABEL) -> bool:
        """Return True: integers as labels are numbers, too."""
        return True


@dataclass(frozen=True, kw_only=True)
class LightGBMRankerSettings(LightGBMRegressorSettings):
    """What and how to train a ranker: every field is also a Spark ML Param of `LightGBMRanker`."""

    objectives: ClassVar[tuple[str, ...]] = ("lambdarank", "rank_xendcg")

    label_cols: Any = setting("The column of the relevance of a row: a small whole number, 0 for none.")
    group_col: str = setting(
        "The column of the group of a row, such as its query: an integer. All rows of a group are on one rank, and all "
        "are trained on, or all validated on where `validation` is a fraction."
    )
    eval_at: Sequence[int] = setting('Positions at which "ndcg" and "map" are computed.', (1, 2, 3, 4, 5))

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong."""
        yield from super().problems()
        if not isinstance(self.group_col, str) or not self.group_col:
            yield f"group_col={self.group_col!r} must be the name of one column."
        at = self.eval_at
        if not isinstance(at, list | tuple) or not at or not all(is_whole(k, 1) for k in at):
            yield f"eval_at={at!r} must be a list of positions from 1 on."

    @property
    def together(self) -> str:
        """The column of the groups."""
        return self.group_col

    def more_sources(self) -> Mapping[str, tuple[str, str | list[str], str]]:
        """Return the columns of groups and of `init_score_col`."""
        return {GROUP: ("group", self.group_col, "int64"), **super().more_sources()}

    def metric_names(self) -> Sequence[str]:
        """Return the names that metrics have in the history: "ndcg@1", …"""
        names = super().metric_names()
        return [f"{n}@{k}" for n in names for k in self.eval_at] if set(names) <= {"ndcg", "map"} else names


def _columns(settings: LightGBMSettings) -> Iterator[str]:
    features = settings.feature_cols
    if isinstance(features, Mapping):
        yield "feature_cols is a mapping; LightGBM takes one input: a list of scalar columns, or a vector column."
        return
    if not isinstance(features, str) and len(set(features)) < len(features):
        yield f"feature_cols={list(features)!r} names a column twice."
    if isinstance(settings.label_cols, Mapping) or len(settings.labels()) != 1:
        yield f"label_cols={settings.label_cols!r} must be one column."
    for name in ("categorical_features", "monotone_constraints"):
        given = getattr(settings, name) or ()
        kinds = list if name == "categorical_features" else Mapping
        if not isinstance(given, (kinds, tuple)):
            yield f"{name}={given!r} must be a {'list of' if kinds is list else 'mapping from'} feature columns."
        elif isinstance(features, str):
            if wrong := [key for key in given if not is_whole(key, 0)]:
                yield f"{name} names {wrong[0]!r}; of the column {features!r} say the position in it, from 0."
        elif wrong := [key for key in given if key not in features]:
            yield f"{name} names {wrong[0]!r}, which is not among feature_cols."
    constraints = settings.monotone_constraints or {}
    if isinstance(constraints, Mapping) and not set(constraints.values()) <= {-1, 0, 1}:
        yield f"monotone_constraints={dict(constraints)!r}: each must be -1, 0 or 1."
    if isinstance(constraints, Mapping) and (both := set(constraints) & set(settings.categorical_features or ())):
        yield f"monotone_constraints names {sorted(both, key=str)[0]!r}, which is a category."
    if settings.init_score_col is not None and not is_names(settings.init_score_col):
        yield f"init_score_col={settings.init_score_col!r} must be a column, or a list of columns."


def _numbers(settings: LightGBMSettings) -> Iterator[str]:
    for name, least in _LEAST.items():
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


def _objective(settings: LightGBMSettings) -> Iterator[str]:
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
        watched = (rule.monitor or settings.metric_names()[0]).removeprefix("validation_")
        larger = is_larger_better(watched)
        if (rule.mode == "max") != larger and (rule.monitor is not None or rule.mode == "max"):
            better = "larger" if larger else "smaller"
            yield f"early_stopping has mode={rule.mode!r}, and of {watched!r} a {better} value is the better one."
