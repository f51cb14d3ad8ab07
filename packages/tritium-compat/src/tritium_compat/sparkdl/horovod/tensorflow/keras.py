"""`LogCallback`: Keras's metrics, shown on the driver (rank)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from tritium_compat.sparkdl.horovod import log_to_driver

_IS_LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # as TensorFlow asks for `tf.keras`
keras: Any = importlib.import_module("tf_keras" if _IS_LEGACY else "keras")


class LogCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sends what Keras logs at the end of each epoch to the driver."""

    def __init__(self, per_batch_log: bool = False) -> None:
        """per_batch_log : whether also what it logs at the end of each batch is sent."""
        super().__init__()
        self._per_batch = per_batch_log
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Send the metrics of an epoch."""
        log_to_driver(f"Epoch {epoch + 1}: {_shown(logs)}")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Send the metrics of a batch, if that was asked for."""
        if self._per_batch:
            log_to_driver(f"Epoch {self._epoch + 1}, batch {batch + 1}: {_shown(logs)}")


def _shown(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}: {float(value):.4g}" for name, value in (logs or {}).items())


__all__ = ["LogCallback"]
