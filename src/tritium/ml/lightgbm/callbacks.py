"""The user's LightGBM callbacks, which every rank calls (rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightgbm
from lightgbm.callback import CallbackEnv, EarlyStopException

from tritium.gang.rank.world import World
from tritium.ml.lightgbm.names import is_larger_better

# Before LightGBM 4.7 a result was a plain tuple.
_Result: Any = getattr(lightgbm.basic, "EvalResult", lambda *values: values)


class BoostingCallbacks:
    """Calls them before and after each iteration, in the order that `lightgbm.train` has."""

    def __init__(self, callbacks: Sequence[Any], world: World, iterations: int) -> None:
        of_this_rank = [c for c in callbacks if world.rank == 0 or type(c).__name__ != "_LogEvaluationCallback"]
        ordered = sorted(of_this_rank, key=lambda callback: int(getattr(callback, "order", 0)))
        self._before = [callback for callback in ordered if getattr(callback, "before_iteration", False)]
        self._after = [callback for callback in ordered if callback not in self._before]
        self._any = bool(callbacks)
        self._world, self._iterations = world, iterations

    def before(self, booster: lightgbm.Booster, iteration: int) -> None:
        """Call those that have `before_iteration`."""
        for callback in self._before:
            callback(self._env(booster, iteration, None))

    def after(self, booster: lightgbm.Booster, iteration: int, metrics: Mapping[str, float]) -> int | None:
        """Call the others with the metrics of the rows of all ranks.

        Returns the number of iterations that the model has, if one of them ended the training by EarlyStopException on
        any rank, the same on every rank; else None.
        """
        if not self._any:
            return None
        results, best = [_result(name, value) for name, value in metrics.items()], None
        for callback in self._after:
            try:
                callback(self._env(booster, iteration, results))
            except EarlyStopException as end:
                best = int(end.best_iteration) + 1
                break
        return next((number for number in self._world.gather(best) if number is not None), None)

    def _env(self, booster: lightgbm.Booster, iteration: int, results: list[Any] | None) -> CallbackEnv:
        return CallbackEnv(booster, booster.params, iteration, 0, self._iterations, results)


def _result(name: str, value: float) -> Any:
    metric = name.removeprefix("validation_")
    return _Result("training" if metric == name else "validation", metric, value, is_larger_better(metric))
