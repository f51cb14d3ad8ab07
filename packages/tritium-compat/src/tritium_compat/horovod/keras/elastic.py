"""`horovod.keras.elastic`: for Keras 3 (rank)."""

from __future__ import annotations

import keras

from tritium_compat.horovod._keras import elastic as parts
from tritium_compat.horovod.torch.elastic import run


class KerasState(parts.ModelState):
    """A model of Keras, its optimizer, and values that are attributes by their names."""


class CommitStateCallback(parts.CommitState, keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state every so many batches, and at the end of each epoch."""


class UpdateBatchStateCallback(parts.UpdateBatchState, keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.batch` to the last batch, and to 0 at the end of an epoch."""


class UpdateEpochStateCallback(parts.UpdateEpochState, keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.epoch` to the number of epochs that are done, also before the training was continued."""


__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
