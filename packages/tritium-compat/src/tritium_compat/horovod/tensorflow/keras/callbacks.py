"""`horovod.tensorflow.keras.callbacks`: for `tf.keras`, which is Keras 3 or tf_keras (rank)."""

from __future__ import annotations

import tensorflow as tf

from tritium_compat.horovod._keras import callbacks as parts


class BroadcastGlobalVariablesCallback(parts.Broadcast, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the weights and optimizer state of `root_rank`, before the first step where that is possible."""


class MetricAverageCallback(parts.MetricAverage, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over all ranks, for the callbacks after this one too."""


class LearningRateScheduleCallback(parts.LearningRateSchedule, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Multiplies the learning rate, from one epoch until another."""


class LearningRateWarmupCallback(parts.LearningRateWarmup, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr`, batch by batch."""


class BestModelCheckpoint(parts.BestModel, tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the best model, under the name that its attribute `filepath` is given before training."""


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
