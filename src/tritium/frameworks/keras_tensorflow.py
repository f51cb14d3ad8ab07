"""Keras on TensorFlow: averages gradients by collectives within the graph (rank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tritium.errors import BadSetting
from tritium.frameworks.framework import Place
from tritium.frameworks.tensorflow import TensorFlow

_GROUP, _FIRST_KEY = 7919, 1 << 20  # Far from the keys that MultiWorkerMirroredStrategy counts up from 1.


def run(place: Place, function: Callable[[TensorFlowRanks], Any]) -> Any:
    """Call the function with TensorFlow's server started in every rank.

    MultiWorkerMirroredStrategy starts it, and ends collectives when a rank is gone. The strategy itself is not used:
    Keras 3 can't train under it.
    """

    def call() -> Any:
        import keras
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        # XLA compiles no collective between processes. Under a strategy of tf.distribute Keras chooses the same.
        keras.Model._resolve_auto_jit_compile = lambda model: False
        keras.Model._maybe_symbolic_build = _build
        return function(TensorFlowRanks(place, strategy))

    return TensorFlow().run(place, call)


class TensorFlowRanks:
    """The ranks of TensorFlow's collectives. Holds the strategy, which ends them when it is freed."""

    def __init__(self, place: Place, strategy: Any) -> None:
        self._size, self._rank = place.size, place.rank
        self._strategy = strategy
        self._keys: dict[tuple[str, int | None], int] = {}

    def check(self, model: Any) -> None:
        """Raise BadSetting for a model that XLA is to compile."""
        if model.jit_compile:
            raise BadSetting(
                "compile(jit_compile=True) can't train on several ranks with Keras's TensorFlow back end: XLA compiles "
                'no collective between processes. Leave it at "auto", or choose tr.Keras(backend="jax").',
                setting="jit_compile",
            )

    def agree(self) -> None:
        """Do nothing: batches may differ in size."""

    def broadcast(self, values: Sequence[Any]) -> list[Any]:
        """Return rank 0's tensors: the sum of them and of the other ranks' zeros."""
        import tensorflow as tf

        tensors = [tf.convert_to_tensor(value) for value in values]
        if self._rank != 0:
            tensors = [tf.zeros_like(value) for value in tensors]
        return self._by_dtype(tensors, lambda flat: flat)

    def mean(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients, averaged over the ranks. Sparse ones become dense."""
        import tensorflow as tf

        present = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
        means = iter(self._by_dtype(present, lambda flat: flat / tf.cast(self._size, flat.dtype)))
        return [None if gradient is None else next(means) for gradient in gradients]

    def _by_dtype(self, tensors: Sequence[Any], then: Callable[[Any], Any]) -> list[Any]:
        """Return the sums over the ranks, one collective for each dtype; `then` is applied to each flat sum."""
        import tensorflow as tf

        sums: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            numbers = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = tf.concat([tf.reshape(tensors[number], [-1]) for number in numbers], 0)
            summed = flat if dtype in _SUMMED else tf.cast(flat, tf.int64)
            total = then(tf.cast(self._sum(summed), dtype))
            parts = tf.split(total, [tf.size(tensors[number]) for number in numbers], num=len(numbers))
            for number, part in zip(numbers, parts, strict=True):
                sums[number] = tf.ensure_shape(tf.reshape(part, tf.shape(tensors[number])), tensors[number].shape)
        return sums

    def _sum(self, flat: Any) -> Any:
        import tensorflow as tf

        # All ranks must give a collective the same key, whatever shapes of batches each has traced graphs for.
        kind = flat.dtype.name, flat.shape[0]
        key = self._keys.setdefault(kind, _FIRST_KEY + len(self._keys))
        return tf.raw_ops.CollectiveReduceV2(
            input=flat,
            group_size=self._size,
            group_key=_GROUP,
            instance_key=key,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="auto",
        )


def _build(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Make all variables before the first step, in which the trainer would make them, as rank 0's are sent."""
    for _, _, batches in iterator or ():
        data_batch = next(batches)
        break
    model._symbolic_build(data_batch=data_batch)


_SUMMED = ("float16", "float32", "float64", "bfloat16", "int32", "int64")
