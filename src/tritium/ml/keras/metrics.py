"""The states of a model's metrics over all rows of all ranks (rank)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tritium.model.engines.keras_weights import as_array

States = list[np.ndarray[Any, Any]]


class MetricStates:
    """The variables of loss and metrics, as Keras updates them: sums over the rows of this rank."""

    def __init__(self, model: Any, world: Any) -> None:
        self._model, self._world = model, world
        self._before: States = []

    def now(self) -> States:
        """Return a copy of the variables' values."""
        sync(self._model)
        return [np.array(as_array(variable)) for variable in self._model.metrics_variables]

    def put(self, states: Sequence[np.ndarray[Any, Any]]) -> None:
        """Set the variables."""
        sync(self._model)
        for variable, value in zip(self._model.metrics_variables, states, strict=True):
            variable.assign(value)

    # ---- a step whose weights were multiplied

    def before_step(self) -> None:
        """Keep the sums as they are before a step whose weights are multiplied."""
        self._before = self.now()

    def after_step(self, factor: float) -> None:
        """Divide what the step has added by the factor of its weights.

        That makes them sums over rows: a step adds a number that is linear in the weights, and the loss, the mean over
        `size` rows on each rank, is counted `size` times.
        """
        self.put(
            [
                then + (now - then) / factor if summed(variable, now) else now
                for variable, then, now in zip(self._model.metrics_variables, self._before, self.now(), strict=True)
            ]
        )

    # ---- over the ranks

    def merge(self) -> dict[str, Any]:
        """Give the variables the sums of all ranks, and return loss and metrics by name. A collective call."""
        if self._world.size > 1:
            self.put(self.total(self._world.gather(self.now())))
        return {name: plain(value) for name, value in self._model.get_metrics_result().items()}

    def total(self, ranks: Sequence[States]) -> States:
        """Return the sums over these ranks' states."""
        sums = []
        for number, variable in enumerate(self._model.metrics_variables):
            values = [states[number] for states in ranks]
            if variable.aggregation == "sum":
                sums.append(np.sum(values, axis=0, dtype=values[0].dtype))
            elif variable.aggregation == "mean":
                sums.append(np.mean(values, axis=0).astype(values[0].dtype))
            else:
                sums.append(values[0])
        return sums

    def share(self, ranks: Sequence[States | None]) -> States | None:
        """Return the state from which this rank continues, of those of all ranks of a checkpoint; None without any."""
        known = [states for states in ranks if states is not None]
        rank, size = self._world.rank, self._world.size
        if not known or len(known[0]) != len(self._model.metrics_variables):
            return None
        if len(known) == size:
            return known[rank]
        mine = known[rank::size]
        return self.total(mine) if mine else None


def summed(variable: Any, value: np.ndarray[Any, Any]) -> bool:
    """Return whether a variable is a sum of floating numbers."""
    return bool(variable.aggregation == "sum" and value.dtype.kind == "f")


def sync(model: Any) -> None:
    """Give the model's variables their current values: on JAX, `fit` keeps these elsewhere between its steps."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def plain(value: Any) -> Any:
    """Return a number or an array of the back end as Python's own."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    import keras

    array = np.asarray(keras.ops.convert_to_numpy(value))
    return float(array) if array.ndim == 0 else array.tolist()


def of_rows(metrics: Any) -> Any:
    """Return metrics, as in compile(), in which a function with one number for a batch returns it for each row.

    Keras weighs the result of a metric function by the weights of the rows, and fails on a single number.
    """
    import keras

    def wrapped(metric: Any) -> Any:
        if isinstance(metric, keras.metrics.Metric | type) or not callable(metric):
            return metric

        @functools.wraps(metric)
        def call(y_true: Any, y_pred: Any) -> Any:
            result = keras.ops.convert_to_tensor(metric(y_true, y_pred))
            row = (slice(None), *(0,) * (len(y_pred.shape) - 1))
            return result if len(result.shape) else result + keras.ops.zeros_like(y_pred[row], result.dtype)

        return call

    return keras.tree.map_structure(wrapped, metrics)


def count_rows(model: Any) -> None:
    """Let the losses of several outputs be means over rows on TensorFlow, as on the other back ends.

    There Keras does not know the rows of a batch while it traces a step, and counts each batch once, a short one like a
    full one. Must be called when loss and metrics are built, and before the first step is traced.
    """
    import keras

    loss = model._compile_loss
    if keras.backend.backend() != "tensorflow" or loss is None:
        return
    call, rows = loss.call, list[Any]()

    def counting(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        rows[:] = [keras.ops.cast(keras.ops.shape(keras.tree.flatten(y_pred)[0])[0], "float32")]
        return call(y_true, y_pred, sample_weight)

    def weighed(update: Any) -> Any:
        return lambda value, sample_weight=None: update(value, rows[0] if sample_weight is None else sample_weight)

    loss.call = counting
    for tracker in loss.metrics:
        tracker.update_state = weighed(tracker.update_state)
