"""LightGBM's metrics over the rows of all ranks, from those of each rank (rank)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightgbm
import numpy as np

from tritium.gang.rank.world import World
from tritium.ml.lightgbm.rows import ShardRows

_OF_GROUPS = ("ndcg", "map")
_SUMS = ("gamma_deviance",)

Values = dict[str, float]


class Metrics:
    """The metrics of a booster over the rows of all ranks. LightGBM computes those of a rank's own rows."""

    def __init__(self, world: World, train: ShardRows | None, validation: ShardRows | None) -> None:
        """Exchange the weights of the ranks.

        train, validation : the rows of this rank; None: not evaluated.
        """
        self._world = world
        self._train = train is not None
        self._weights = world.gather((_weights(train), _weights(validation)))

    def of(self, booster: lightgbm.Booster) -> Values:
        """Return the metrics after an iteration, those of validation rows as "validation_…"; the same on every rank."""
        if not any(any(part) for weights in self._weights for part in weights):  # No rank evaluates any rows.
            return {}
        train = _values(booster.eval_train()) if self._train else {}
        of_ranks = self._world.gather((train, _values(booster.eval_valid())))
        training = _merged([part[0] for part in of_ranks], [weights[0] for weights in self._weights])
        validation = _merged([part[1] for part in of_ranks], [weights[1] for weights in self._weights])
        return training | {f"validation_{name}": value for name, value in validation.items()}


def _weights(rows: ShardRows | None) -> tuple[float, float]:
    """Return the weights of a rank in means over rows and over groups."""
    if rows is None:
        return 0.0, 0.0
    weight, sizes = rows.weight, rows.group_sizes
    of_rows = float(rows.count) if weight is None else float(weight.sum(dtype=np.float64))
    if sizes is None:
        return of_rows, of_rows
    if weight is None:
        return of_rows, float(len(sizes))
    starts = np.cumsum(sizes) - sizes  # LightGBM weighs a group by the mean of its rows' weights.
    return of_rows, float((np.add.reduceat(weight.astype(np.float64), starts) / sizes).sum())


def _values(results: Sequence[Any]) -> Values:
    return {str(result[1]): float(result[2]) for result in results}


def _merged(parts: Sequence[Values], weights: Sequence[tuple[float, float]]) -> Values:
    # A rank whose weights are all 0 has NaN as metrics, so it takes no part in the mean.
    with_weight = [(values, weight) for values, weight in zip(parts, weights, strict=True) if values and any(weight)]
    return {} if not with_weight else {name: _mean(name, with_weight) for name in with_weight[0][0]}


def _mean(name: str, parts: Sequence[tuple[Values, tuple[float, float]]]) -> float:
    if len(parts) == 1:  # A mean of one would round the last bit.
        return parts[0][0][name]
    base = name.partition("@")[0]
    if base in _SUMS:
        return math.fsum(values[name] for values, _ in parts)
    values = np.array([values[name] for values, _ in parts])
    weights = np.array([weight[base in _OF_GROUPS] for _, weight in parts])
    if base == "rmse":
        return float(np.sqrt(np.average(values**2, weights=weights)))
    return float(np.average(values, weights=weights)) if weights.sum() > 0 else float(values.mean())
