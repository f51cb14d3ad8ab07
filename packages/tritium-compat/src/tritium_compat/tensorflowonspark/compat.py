"""`tensorflowonspark.compat`: what has changed between TensorFlow's versions (rank)."""

from __future__ import annotations

import tempfile
from typing import Any


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Write a Keras model as a SavedModel; ranks other than the chief write it to a directory that is removed."""
    if is_chief:
        _export(model, export_dir)
        return
    with tempfile.TemporaryDirectory(prefix="tritium-export-") as home:
        _export(model, f"{home}/model")


def _export(model: Any, path: str) -> None:
    if hasattr(model, "export"):
        model.export(path)
    else:
        model.save(path, save_format="tf")


def disable_auto_shard(options: Any) -> None:
    """Let every rank read a whole dataset: `tf.data.Options` without sharding."""
    import tensorflow as tf

    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF


def is_gpu_available() -> bool:
    """Return whether TensorFlow sees a GPU."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))
