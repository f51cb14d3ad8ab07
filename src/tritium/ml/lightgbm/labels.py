"""Labels and weights that LightGBM can't be trained with, refused by the names of their columns (rank)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tritium.errors import BadData, BadSetting
from tritium.gang.rank.world import World
from tritium.ml.lightgbm.parameters import parameter
from tritium.ml.lightgbm.rows import Array, ShardRows
from tritium.ml.lightgbm.settings import LightGBMRankerSettings, LightGBMSettings
from tritium.ml.settings import LABEL

_GRADES = 31  # LightGBM knows the gain of so many, without label_gain.
_NEGATIVE: tuple[Callable[[Array], Array], str] = (lambda label: label < 0, "numbers of at least 0")
_NOT_POSITIVE: tuple[Callable[[Array], Array], str] = (lambda label: label <= 0, "numbers above 0")
_NO_PROBABILITY: tuple[Callable[[Array], Array], str] = (
    lambda label: (label < 0) | (label > 1),
    "numbers from 0 to 1",
)
# Objective → which labels it does not take, and which it takes; then the same for metrics.
_OBJECTIVES = {
    **dict.fromkeys(("poisson", "tweedie", "gamma"), _NEGATIVE),
    **dict.fromkeys(("cross_entropy", "cross_entropy_lambda"), _NO_PROBABILITY),
}
_METRICS = {
    **dict.fromkeys(("gamma", "gamma_deviance"), _NOT_POSITIVE),
    **dict.fromkeys(("cross_entropy", "cross_entropy_lambda", "kullback_leibler"), _NO_PROBABILITY),
}
_NOT_ALL_ZERO = ("poisson", "gamma", "tweedie")


def check_labels(world: World, rows: ShardRows, validation: ShardRows | None, settings: LightGBMSettings) -> None:
    """Raise BadData for labels that the objective or a metric does not take, and for weights that are all 0."""
    objective, column = settings.objective or settings.objectives[0], settings.labels()[0]
    for part in (rows, validation):
        if part is not None:
            _check_labels(part, settings)
    if objective in _NOT_ALL_ZERO and not rows.label.any():
        raise BadData(
            f"label column {column!r} holds only zeros in the {rows.count} rows of rank {world.rank}; {objective!r} "
            "needs one above 0 on each rank.",
            column=column,
        )
    if settings.weight_col is not None:
        _check_weights(world, {"train": rows, "validation": validation}, settings.weight_col)


def check_scores(rows: ShardRows, classes: int | None, settings: LightGBMSettings) -> None:
    """Raise BadSetting unless there are as many columns of scores to begin with as the model has scores."""
    if (scores := rows.init_score) is None:
        return
    one_each = classes is not None and (classes > 2 or settings.objective not in (None, "binary"))
    count, needed = 1 if scores.ndim == 1 else scores.shape[1], classes if one_each else 1
    if count != needed:
        raise BadSetting(
            f"init_score_col={settings.init_score_col!r} names {count} column{'s' * (count > 1)}; this model, of "
            f"{classes} classes, takes {needed}.",
            setting="init_score_col",
        )


def _check_labels(rows: ShardRows, settings: LightGBMSettings) -> None:
    objective = settings.objective or settings.objectives[0]
    if objective in _OBJECTIVES:
        wrong, takes = _OBJECTIVES[objective]
        rows.refuse(LABEL, wrong, f"objective={objective!r} takes {takes}")
    for metric in settings.metric_names():
        if metric in _METRICS:
            wrong, takes = _METRICS[metric]
            rows.refuse(LABEL, wrong, f"the metric {metric!r} takes {takes}")
    if isinstance(settings, LightGBMRankerSettings):
        gains = parameter(dict(settings.native_params or {}), "label_gain", None)
        count = _GRADES if gains is None else len(gains.split(",") if isinstance(gains, str) else gains)

        def wrong_grade(label: Array) -> Array:
            return np.asarray((label < 0) | (label >= count) | (label != np.floor(label)))

        rows.refuse(
            LABEL, wrong_grade, f"a relevance is a whole number from 0 to {count - 1} (label_gain= has its gain)"
        )


def _check_weights(world: World, parts: Mapping[str, ShardRows | None], column: str) -> None:
    sums = {
        name: float(part.weight.sum()) for name, part in parts.items() if part is not None and part.weight is not None
    }
    every = world.gather(sums)
    for name in parts:
        of_ranks = [of[name] for of in every if name in of]
        if of_ranks and not any(of_ranks):
            raise BadData(
                f"weight column {column!r} of {name!r} holds only zeros. Give the rows that count a weight above 0.",
                column=column,
            )
