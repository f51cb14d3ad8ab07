"""`LightGBMSettings`: the settings of a training with LightGBM (any process)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from tritium.errors import BadSetting
from tritium.hints import question
from tritium.ml.early_stopping import EarlyStopping
from tritium.ml.epoch_settings import IterativeSettings
from tritium.ml.fields import is_names, is_whole, setting
from tritium.ml.lightgbm.checks import (
    LEAST,
    callback_problems,
    column_problems,
    is_one,
    number_problems,
    objective_problems,
)
from tritium.ml.lightgbm.names import METRIC_NAMES, OF_LIGHTGBM, OF_OTHERS, OF_SYNAPSEML, is_larger_better
from tritium.ml.settings import FEATURES, LABEL

GROUP, INIT_SCORE = "group", "init_score"
BATCH_SIZE = 16_384
"""The rows of a call to predict."""


@dataclass(frozen=True, kw_only=True)
class LightGBMSettings(IterativeSettings):
    """The settings of a training with LightGBM, whatever is predicted. Names are LightGBM's own."""

    framework: ClassVar[str] = "lightgbm"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **IterativeSettings.choices,
        "tree_learner": ("data", "voting", "serial"),
        "boosting": ("gbdt", "dart", "rf"),
        "feature_dtype": ("float32", "float64"),
        "training_metric": (True, False),
    }
    whole: ClassVar[tuple[str, ...]] = (*IterativeSettings.whole, *LEAST, "max_depth")
    hints: ClassVar[Mapping[str, str]] = {
        **IterativeSettings.hints,
        **{name: question(*settings) for name, settings in {**OF_SYNAPSEML, **OF_OTHERS}.items()},
        **{name: f" Give it to LightGBM by native_params={{{name!r}: …}}." for name in OF_LIGHTGBM},
        "params": " That is what Spark ML calls all settings; LightGBM's other parameters go into native_params=.",
    }
    objectives: ClassVar[tuple[str, ...]] = ()
    """Those that the estimator may have, the default first."""
    loss_names: ClassVar[tuple[str, ...]] = ()
    one_input: ClassVar[bool] = True
    unit: ClassVar[str] = "iteration"

    num_iterations: int = setting(
        "How many trees are trained (of each class, where there are several).", 100, resume="any"
    )
    learning_rate: float = setting("The factor by which each tree's outputs are shrunk.", 0.1, resume="same")
    num_leaves: int = setting("The most leaves that a tree may have.", 31, resume="same")
    max_depth: int = setting("The greatest depth of a tree; -1: any.", -1, resume="same")
    min_data_in_leaf: int = setting("The fewest rows, of all ranks, that a leaf may have.", 20, resume="same")
    feature_fraction: float = setting("The part of the features that each tree is grown from.", 1.0, resume="same")
    bagging_fraction: float = setting(
        "The part of the rows that trees are grown from, with bagging_freq above 0.", 1.0, resume="same"
    )
    bagging_freq: int = setting(
        "After how many iterations other rows are drawn; 0: all rows are used.", 0, resume="same"
    )
    lambda_l1: float = setting("L1 regularization of the leaves.", 0.0, resume="same")
    lambda_l2: float = setting("L2 regularization of the leaves.", 0.0, resume="same")
    max_bin: int = setting("The most bins into which the values of a feature are put.", 255, resume="same")
    boosting: Literal["gbdt", "dart", "rf"] = setting(
        'The kind of boosting: "gbdt", or "dart" and "rf", whose training starts over in a retry.',
        "gbdt",
        resume="same",
    )
    objective: str | None = setting("LightGBM's objective. None: the usual one of this estimator.", None, resume="same")
    metrics: Any = setting(
        "LightGBM's metrics, a name or a list of names; the first is the one that early stopping looks at. None: that "
        "of the objective.",
        None,
        resume="any",
    )
    training_metric: bool = setting(
        "Whether the metrics are also computed of the rows that are trained on.", True, resume="any"
    )
    tree_learner: Literal["data", "voting", "serial"] = setting(
        'How several ranks train one tree: "data" (histograms of all features are summed), or "voting" (only those of '
        'the features that ranks vote for). "serial" is for one rank.',
        "data",
        resume="any",
    )
    categorical_features: Sequence[str | int] = setting(
        "Feature columns whose numbers (whole, from 0) are categories; of a vector or array column the positions in "
        "it, or the names that VectorAssembler gave. Negative ones are missing. Words (`vocabulary`, `hash_buckets`) "
        "are categories anyway.",
        (),
        resume="same",
    )
    monotone_constraints: Mapping[Any, int] | None = setting(
        "Feature column (of a vector or array column the position in it) -> 1 where the prediction may only rise with "
        "it, -1 where it may only fall.",
        None,
        resume="same",
    )
    init_score_col: Any = setting(
        "A column of scores that the training begins with, in place of the average; for several classes a list of "
        "columns. The model's predictions do not include them.",
        None,
        resume="any",
    )
    native_params: Mapping[str, Any] | None = setting(
        "Other parameters of LightGBM, by its own names: {'min_gain_to_split': 0.1}.", None, resume="same"
    )
    callbacks: Sequence[Any] = setting(
        "Callbacks as `lightgbm.train` takes them. Every rank calls them, with the metrics of the rows of all ranks.",
        (),
        resume="any",
    )
    feature_dtype: Literal["float32", "float64"] = setting(
        "The numbers in which features are read, in training and prediction.", "float32", resume="same"
    )
    early_stopping: Any = setting("EarlyStopping(...), or its patience in iterations.", None, resume="any")
    checkpoint_every: Any = setting(
        "How often the training is saved to the run directory, from which a retry, or a later fit with the same "
        'run_dir, continues: a time ("1min"), a number of iterations, or None: never.',
        "1min",
        resume="any",
    )
    if_data_changed: Literal["refuse", "restart"] = setting(
        "When a training continues over other rows than it was begun with: "
        '"refuse", or "restart", which adds trees that are trained on the current rows.',
        "refuse",
        resume="any",
    )
    nan: Literal["error", "keep"] = setting(
        'Whether a NaN in a feature is an error, or a missing value ("keep"), in training and prediction.',
        "keep",
        resume="same",
    )
    nulls: Mapping[str, float] | None = setting(
        "Column -> the number in place of a null in it, in training and prediction. A null in any other feature is a "
        "missing value, in any other column an error.",
        None,
        resume="any",
    )
    prediction_batch_size: int = setting(
        "Rows that the trained model is called with at once, to predict.", BATCH_SIZE, resume="any"
    )
    weight_col: str | None = setting("A column of weights of the rows.", None, resume="any")
    seed: int = setting("Decides LightGBM's random numbers and the validation fraction.", 0, resume="same")

    def __post_init__(self) -> None:
        columns = self.feature_cols
        columns = list(columns.values()) if isinstance(columns, Mapping) else [columns]
        if self.nan == "keep" and all(map(is_names, columns)) and isinstance(self.nulls or {}, Mapping):
            names = [name for listed in columns for name in ([listed] if isinstance(listed, str) else listed)]
            words = {*(self.vocabulary or ()), *(self.hash_buckets or ())}
            # Of a category LightGBM takes -1 for missing.
            missing = {name: -1 if name in words else math.nan for name in names}
            object.__setattr__(self, "nulls", missing | dict(self.nulls or {}))
        super().__post_init__()

    def nan_by_column(self) -> Any:
        """Return the rule for a NaN by column: only features may miss values; in any other the row is left out."""
        return dict.fromkeys(self.inputs(), self.nan) if self.on_error == "skip" else self.nan

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each error of the settings."""
        yield from super().problems()
        if self.normalize:
            yield "trees compare the numbers of a feature with each other alone, and need no normalize=: leave it out."
        yield from column_problems(self)
        yield from number_problems(self)
        yield from objective_problems(self)
        yield from callback_problems(self.callbacks)

    def check_ranks(self, ranks: int) -> None:
        """Raise BadSetting where several ranks would each train a model of their own."""
        if ranks > 1 and self.tree_learner == "serial":
            raise BadSetting(
                f'tree_learner="serial" is for one rank, and there are {ranks}. Use "data" or "voting".',
                setting="tree_learner",
            )
        if ranks > 1 and self.min_data_in_leaf == 0:  # LightGBM 4.7 fails, as it estimates a leaf's rows as 0.
            raise BadSetting(
                f"min_data_in_leaf=0 is for one rank, and there are {ranks}: several grow no leaf without rows. Use 1.",
                setting="min_data_in_leaf",
            )

    @property
    def dtype_of_features(self) -> str:
        """`feature_dtype`, also of integers: a missing value is a NaN."""
        return self.feature_dtype

    def inputs(self) -> dict[str, str | list[str]]:
        """Return batch column → source columns: numbers side by side, and each column of words on its own."""
        if is_one(self.feature_cols):
            return super().inputs()
        words = [name for name in self.feature_cols if name in {*self.words(), *(self.hash_buckets or ())}]
        numbers = [name for name in self.feature_cols if name not in words]
        return {**({FEATURES: numbers} if numbers else {}), **{f"{name}_index": name for name in words}}

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
        columns = self.init_score_col
        if columns is None:
            return {}
        return {INIT_SCORE: ("init_score", columns if isinstance(columns, str) else list(columns), "float64")}

    def stopping_rule(self) -> EarlyStopping | None:
        """Return the rule for the metric that comes first where `metrics` says which, else that of the objective."""
        return self.rule(self.metric_names())

    def stopping_rule_after(self, state: Mapping[str, Any]) -> EarlyStopping | None:
        """Return the current rule of a training that has left this state of early stopping in a checkpoint."""
        return self.rule(state["metrics"]) if state["metrics"] else None

    @property
    def rounds(self) -> int:
        """How many iterations a training has."""
        return self.num_iterations

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether a training is saved, as it can be continued."""
        return self.checkpoint_every is not None and self.boosting == "gbdt"

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
    """The settings of a classifier's training: every field is also a Spark ML Param of `LightGBMClassifier`."""

    objectives: ClassVar[tuple[str, ...]] = ("binary", "multiclass", "multiclassova")
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**LightGBMSettings.choices, "task": ("classification",)}

    label_cols: Any = setting(
        "The column of the classes: the whole numbers 0, 1, 2, …, as StringIndexer makes them.", resume="any"
    )
    num_class: int | None = setting(
        "The number of classes. None: as many as the labels of all rows have.", None, resume="same"
    )
    objective: str | None = setting(
        'LightGBM\'s objective: "binary", "multiclass" or "multiclassova". None: "binary" for two classes, else '
        '"multiclass".',
        None,
        resume="same",
    )
    task: Literal["classification"] = setting("What predictions are.", "classification", resume="same")

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each error of the settings."""
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
    """The settings of a regressor's training: every field is also a Spark ML Param of `LightGBMRegressor`."""

    objectives: ClassVar[tuple[str, ...]] = (
        *("regression", "regression_l1", "huber", "fair", "poisson", "quantile", "mape", "gamma", "tweedie"),
        *("cross_entropy", "cross_entropy_lambda"),
    )
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**LightGBMSettings.choices, "task": ("regression",)}

    label_cols: Any = setting("The column of the numbers to predict.", resume="any")
    task: Literal["regression"] = setting("What predictions are.", "regression", resume="same")

    def is_of_one_score(self, label: str = LABEL) -> bool:
        """Return True: integers as labels are numbers, too."""
        return True


@dataclass(frozen=True, kw_only=True)
class LightGBMRankerSettings(LightGBMRegressorSettings):
    """The settings of a ranker's training: every field is also a Spark ML Param of `LightGBMRanker`."""

    objectives: ClassVar[tuple[str, ...]] = ("lambdarank", "rank_xendcg")

    label_cols: Any = setting("The column of the relevance of a row: a small whole number, 0 for none.", resume="any")
    group_col: str = setting(
        "The column of the group of a row, such as its query: an integer or a word. All rows of a group are on one "
        "rank, and all are trained on, or all validated on where `validation` is a fraction.",
        resume="any",
    )
    eval_at: Sequence[int] = setting('Positions at which "ndcg" and "map" are computed.', (1, 2, 3, 4, 5), resume="any")

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each error of the settings."""
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
