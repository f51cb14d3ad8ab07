"""`SyncBatchNormalization`: batch normalization over the batches of all ranks (rank)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tritium_compat.horovod import context
from tritium_compat.horovod.basics import Sum
from tritium_compat.horovod.tensorflow.ops import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Normalizes by the mean and variance over the batches of all ranks, which have as many rows each."""

    def __init__(self, fused: Any = False, **options: Any) -> None:
        """fused : not taken. The other arguments are those of `tf.keras.layers.BatchNormalization`."""
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        options["name"] = options.get("name") or "sync_batch_normalization"
        if "tf_keras" in tf.keras.layers.BatchNormalization.__module__:
            options["fused"] = False
        super().__init__(**options)

    def _moments(self, *args: Any, **options: Any) -> Any:
        mean, variance = super()._moments(*args, **options)
        size = context.current().size
        if size == 1:
            return mean, variance
        own = tf.stack([mean, variance + tf.square(mean)])
        mean, of_squares = tf.unstack(allreduce(own, op=Sum) / tf.cast(size, own.dtype))
        return mean, of_squares - tf.square(mean)
