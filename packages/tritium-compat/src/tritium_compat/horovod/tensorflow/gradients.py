"""Gradients of TensorFlow, reduced over the ranks (rank)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tritium_compat.horovod.basics import Min
from tritium_compat.horovod.options import Options
from tritium_compat.horovod.tensorflow.ops import allreduce, reduce_all


class Reducer:
    """Reduces gradients as its options say, but for those of variables that stay local."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._local: dict[int, Any] = {}

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradients of this variable to this rank."""
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradients of this variable stay here."""
        return id(variable) in self._local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, reduced; None where one is None."""
        options = self.options
        found = list(gradients)
        if options.sparse_as_dense:
            found = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in found]
        sent = [n for n, g in enumerate(found) if g is not None and not self.is_local(variables[n])]
        if sent and not options.alone():
            parts = options.parts([variables[n] for n in sent])
            for number, part in enumerate(parts):
                places = [sent[n] for n in part]
                means = reduce_all(
                    [found[n] for n in places],
                    self._name(number, len(parts)),
                    options.op,
                    *options.scales,
                    options.process_set,
                    options.compression,
                )
                for n, mean in zip(places, means, strict=True):
                    found[n] = mean
        if options.scale_local_gradients and self._local:
            size = options.process_set.size()
            for n, gradient in enumerate(found):
                if gradient is not None and self.is_local(variables[n]):
                    found[n] = divided(gradient, size)
        return found

    def all_ranks(self, flag: Any) -> Any:
        """Return whether the flag is set on all ranks."""
        if self.options.alone():
            return flag
        number, name = tf.cast(flag, tf.int32), f"{self.options.name}.finite"
        return allreduce(number, op=Min, name=name, process_set=self.options.process_set) > 0

    def _name(self, number: int, parts: int) -> str:
        name = self.options.name if parts == 1 else f"{self.options.name}.{number}"
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # A session of TensorFlow 1 may run several of them at the same time.
        return str(graph.unique_name(name)) if graph is not None and not graph.building_function else name


class Aggregation:
    """Sums the gradients of several backward passes, and reduces the sums after the last."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        options = reducer.options
        self._passes, self._averages = options.backward_passes_per_step, options.average_aggregated_gradients
        with tf.init_scope():
            self.counter = tf.Variable(0, trainable=False, dtype=tf.int32)
        self._sums: dict[int, Any] = {}

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced sums after the last pass, before it the sums until now."""
        given = [n for n, gradient in enumerate(gradients) if gradient is not None]
        for n in given:
            gradient = gradients[n]
            if isinstance(gradient, tf.IndexedSlices):
                if not self._reducer.options.sparse_as_dense:
                    raise ValueError(
                        "backward_passes_per_step > 1 does not sum sparse gradients (tf.IndexedSlices). Give "
                        "sparse_as_dense=True too."
                    )
                gradient = tf.convert_to_tensor(gradient)
            if n not in self._sums:
                with tf.init_scope():
                    self._sums[n] = tf.Variable(tf.zeros(gradient.shape, gradient.dtype), trainable=False)
            self._sums[n].assign_add(gradient)
        self.counter.assign_add(1)
        sums = [self._sums[n].read_value() for n in given]

        def last() -> list[Any]:
            reduced = self._reducer.reduce(sums, [variables[n] for n in given])
            for n in given:
                self._sums[n].assign(tf.zeros_like(self._sums[n]))
            self.counter.assign(0)
            return [divided(one, self._passes) for one in reduced] if self._averages else reduced

        found = iter(_cond(tf.equal(self.counter, self._passes), last, lambda: sums))
        return [None if gradient is None else next(found) for gradient in gradients]

    def apply(self, apply: Any, optimizer: Any) -> Any:
        """Call `apply` after the last pass; before it, count an iteration of the optimizer."""

        def wait() -> Any:
            return optimizer.iterations.assign_add(1)

        def go() -> Any:
            apply()
            return tf.identity(optimizer.iterations)

        return tf.cond(tf.equal(self.counter, 0), go, lambda: tf.identity(wait()))


def divided(gradient: Any, number: int) -> Any:
    """Return a dense or sparse gradient, divided."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(number, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(number, gradient.dtype)


def _cond(which: Any, yes: Any, no: Any) -> list[Any]:
    found = tf.cond(which, yes, no)
    return list(found) if isinstance(found, list | tuple) else [found]
