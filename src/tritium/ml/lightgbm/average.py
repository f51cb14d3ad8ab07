"""The average that several ranks begin with, where LightGBM would take the mean of the ranks' averages (rank)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np

from tritium.gang.rank.world import World
from tritium.ml.lightgbm.parameters import parameter
from tritium.ml.lightgbm.rows import ShardRows

_LEAST_PROBABILITY = 1e-15  # LightGBM takes it in place of 0.
# Objective → the score that LightGBM begins with for a mean of the labels. "binary" and "multiclass" are missing, as
# LightGBM sums their labels over all ranks, and so are those that begin with a percentile, such as "regression_l1".
_SCORES: Mapping[str, Callable[[float], float]] = {
    **dict.fromkeys(("regression", "huber", "fair"), float),
    **dict.fromkeys(("poisson", "gamma", "tweedie"), math.log),
    "cross_entropy": lambda mean: _log_odds(min(max(mean, _LEAST_PROBABILITY), 1 - _LEAST_PROBABILITY)),
    "cross_entropy_lambda": lambda mean: math.log(math.expm1(max(mean, _LEAST_PROBABILITY))),
}


def average_score(world: World, rows: ShardRows, params: dict[str, Any]) -> float | None:
    """Return the score that one process would begin with, the same on every rank; None: LightGBM has it itself.

    It goes into the datasets as their initial score, and by `add_average` into the first tree.
    """
    objective = str(params["objective"])
    asked = _is_true(parameter(params, "boost_from_average", True))
    if world.size == 1 or objective not in _SCORES or params["boosting"] == "rf" or not asked:
        return None
    label = rows.label.astype(np.float32).astype(np.float64)
    if objective == "regression" and _is_true(parameter(params, "reg_sqrt", False)):
        label = np.sign(label) * np.sqrt(np.abs(label)).astype(np.float32)
    weight = np.ones(rows.count) if rows.weight is None else rows.weight.astype(np.float64)
    sums = world.gather((float((label * weight).sum()), float(weight.sum())))
    return _SCORES[objective](math.fsum(part for part, _ in sums) / math.fsum(part for _, part in sums))


@dataclass(frozen=True)
class Added:
    """An average that was added to the first tree of a booster."""

    average: float
    shrinkage: float
    """The factor by which the tree's own outputs were shrunk then."""

    def text(self, text: str) -> str:
        """Return a model's text with its first tree in the form of one to which LightGBM has added its own average.

        `Booster.refit` would multiply the average by the factor that the text names, which LightGBM sets to 1.
        """
        head, first, rest = re.split(r"(?<=\n)(?=Tree=[01]\n|end of trees)", text, maxsplit=2)
        factor = _first(r"shrinkage=(.*)", first) / self.shrinkage  # It is 1, but for a tree that "dart" has dropped.
        first = re.sub(r"(?<=\nshrinkage=).*", repr(factor), first)
        first = re.sub(r"(?<=\ninternal_value=).+", lambda match: _plus(match[0], self.average * factor), first)
        head = re.sub(r"(?<=\n)tree_sizes=.*\n", "", head)  # It reads a text without, and writes them.
        text_of_model: str = lightgbm.Booster(model_str=head + first + rest).model_to_string(num_iteration=-1)
        return text_of_model


def add_average(booster: lightgbm.Booster, average: float) -> Added:
    """Add the average to the leaves of the first tree, as LightGBM does with its own."""
    text = booster.model_to_string(num_iteration=1)
    for leaf in range(int(_first(r"num_leaves=(.*)", text))):
        booster.set_leaf_output(0, leaf, booster.get_leaf_output(0, leaf) + average)
    return Added(average, _first(r"shrinkage=(.*)", text))


def _first(pattern: str, text: str) -> float:
    match = re.search(f"(?<=\n){pattern}", text)
    assert match is not None
    return float(match[1])


def _plus(values: str, number: float) -> str:
    return " ".join(repr(float(value) + number) for value in values.split())


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "+")


def _log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))
