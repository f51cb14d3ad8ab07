"""The state of a Keras model that is committed, and the callbacks that commit it (rank)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tritium_compat.horovod import context
from tritium_compat.horovod._keras import variables
from tritium_compat.horovod.elastic import ObjectState, State
from tritium_compat.horovod.torch.functions import broadcast_object


class ModelState(ObjectState):
    """A model of Keras, its optimizer, and values that are attributes by their names."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Make a state of a model that is built; optimizer : None: the one it is compiled with."""
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model, self.optimizer = model, optimizer or model.optimizer
        super().__init__(broadcast_object, lambda: context.current().rank, **kwargs)
        self._save_model()

    def _variables(self) -> dict[str, list[Any]]:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        found = {"model": list(self.model.weights)}
        return found | ({} if self.optimizer is None else {"optimizer": variables.optimizer_variables(self.optimizer)})

    def _save_model(self) -> None:
        self._saved = {
            part: [np.array(value) for value in variables.values(listed)] for part, listed in self._variables().items()
        }

    def save(self) -> None:
        """Save all in memory."""
        self._save_model()
        super().save()

    def restore(self) -> None:
        """Go back to what was last saved. Raises ValueError where the model or optimizer has other variables."""
        for part, listed in self._variables().items():
            saved = self._saved[part]
            if [tuple(one.shape) for one in listed] != [value.shape for value in saved]:
                raise ValueError(
                    f"The {part} has {len(listed)} variables, and the commit {len(saved)}, or their shapes differ. "
                    "Build both before the state is made: train a step, as in Horovod's examples."
                )
            for variable, value in zip(listed, saved, strict=True):
                variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take rank 0's state, and save it."""
        variables.broadcast([one for listed in self._variables().values() for one in listed], 0)
        super().sync()
        self.save()

    def kept(self) -> Mapping[str, Any]:
        """Return what was last saved."""
        return {"values": self._saved_state, "parts": self._saved}

    def take_kept(self, kept: Mapping[str, Any]) -> None:
        """Take what `kept` returned as what was last saved."""
        super().take_kept(kept)
        self._saved |= kept["parts"]


class CommitState:
    """Commits a state every so many batches, and at the end of each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        """state : what is committed. batches_per_commit : how often."""
        super().__init__()
        self._state, self._every, self._left = state, batches_per_commit, batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count batches."""
        self._left = self._every

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        self._left -= 1
        if self._left == 0:
            self._left = self._every
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self._state.commit()


class UpdateBatchState:
    """Sets `state.batch` to the last batch, and to 0 at the end of an epoch."""

    def __init__(self, state: Any) -> None:
        """state : one with the attribute `batch`."""
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set it to the batch."""
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set it to 0."""
        self._state.batch = 0


class UpdateEpochState:
    """Sets `state.epoch` to the number of epochs that are done, also before the training was continued."""

    def __init__(self, state: Any) -> None:
        """state : one with the attribute `epoch`."""
        super().__init__()
        self._state = state
        self._first = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Remember how many were done before."""
        self._first = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self._state.epoch = self._first + epoch + 1
