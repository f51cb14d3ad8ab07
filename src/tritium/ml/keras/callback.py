"""Tritium's callback in Keras's `fit`, and the list that calls it before the user's callbacks (rank)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tritium.errors import TrainingDiverged
from tritium.ml.history import epoch_entry
from tritium.ml.keras.metrics import MetricStates
from tritium.ml.keras.rows import EpochRows, Step
from tritium.ml.progress import TrainingProgress

_WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger")
_NO_STATE = ("params", "_model")


class TrainingCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes the logs those over all rows of all ranks, and tells the training of each step and epoch."""

    def __init__(
        self,
        states: MetricStates,
        progress: TrainingProgress,
        on_step: Callable[[Step], None],
        on_epoch_end: Callable[[dict[str, Any]], Mapping[str, Any]],
    ) -> None:
        """Take the training's own hooks.

        on_step      : called after each step.
        on_epoch_end : called with the entry of an epoch in the history, to which it adds. It returns the logs of the
                       validation, under Keras's names.
        """
        super().__init__()
        self._states, self._progress = states, progress
        self._on_step, self._on_epoch_end = on_step, on_epoch_end
        self.rows: EpochRows | None = None
        self.resumed: Sequence[np.ndarray[Any, Any]] | None = None
        """The states of metrics with which the next epoch begins, as it continues."""
        self.before_first_step: Callable[[], None] | None = None
        self.seconds_before = 0.0
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.monotonic()
        if self.resumed is not None:
            self._states.put(self.resumed)
        else:
            self.seconds_before = 0.0
        self.resumed = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.before_first_step is not None:
            self.before_first_step()
            self.before_first_step = None
        if self._step(batch).factor != 1:
            self._states.before_step()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        step, loss = self._step(batch), float((logs or {}).get("loss", 0.0))
        epoch = self._epoch()
        if not math.isfinite(loss):
            raise diverged(epoch.number, step.step)
        if step.factor != 1:
            self._states.after_step(step.factor)
        epoch.taken = step.step + 1
        self._on_step(step)
        self._progress.on_step(epoch, [step], loss)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert self.rows is not None
        of_all_ranks = self._states.merge()
        means = {name: of_all_ranks.get(name, value) for name, value in (logs or {}).items()} | of_all_ranks
        if not math.isfinite(means.get("loss", 0.0)):
            raise diverged(epoch, self.rows.epoch.steps - 1)
        steps = [self.rows.step(number) for number in range(self.rows.epoch.steps)]
        rows = sum(step.total for step in steps)
        width = sum(step.widest for step in steps) * len(self.rows.epoch.counts)
        entry = epoch_entry(epoch + 1, means, seconds=self.seconds(), rows=rows, padded=width - rows)
        entry["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        later = self._on_epoch_end(entry)
        if logs is not None:
            logs.update({**means, **later})

    def seconds(self) -> float:
        """Return the seconds of this epoch's steps so far, with those of earlier attempts."""
        return self.seconds_before + time.monotonic() - self._began

    def _epoch(self) -> Any:
        assert self.rows is not None
        return self.rows.epoch

    def _step(self, batch: int) -> Step:
        assert self.rows is not None
        return self.rows.step(self.rows.epoch.first + batch)


class KerasCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of a training, which begins and ends once, whatever the number of `fit`s.

    A `stop_training` that is set in the middle of an epoch ends it after that epoch: the other ranks, which see other
    logs there, would wait for this one.
    """

    def __init__(self, ours: TrainingCallback, others: Sequence[Any], model: Any, epochs: int) -> None:
        super().__init__([ours, *others], add_history=True, add_progbar=False, model=model, epochs=epochs, verbose=0)
        self.callbacks: list[Any]
        self._ours = list(self.callbacks)
        self.model_to_stop = model
        self.stop = False
        self.after_epoch_begin: Callable[[], None] | None = None
        """Called once, after the first `on_epoch_begin`."""

    def begin(self) -> None:
        """Call `on_train_begin` of all."""
        super().on_train_begin()

    def end(self, logs: Any = None) -> None:
        """Call `on_train_end` of all."""
        self.callbacks = list(self._ours)
        super().on_train_end(logs)

    def on_train_begin(self, logs: Any = None) -> None:
        """Do nothing: each `fit` is only one epoch of the training."""

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the callback that the hook of each `fit` puts before the others."""
        self.callbacks = list(self._ours)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if self.after_epoch_begin is not None:
            self.after_epoch_begin()
            self.after_epoch_begin = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        if self.model_to_stop.stop_training:
            self.model_to_stop.stop_training = False
            self.stop = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.stop = self.stop or bool(self.model_to_stop.stop_training)


def of_this_rank(callbacks: Sequence[Any], rank: int) -> list[Any]:
    """Return the callbacks that this rank calls: rank 0 all, the others not those of Keras that write files."""
    kinds = tuple(getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name))
    return [callback for callback in callbacks if rank == 0 or not isinstance(callback, kinds)]


def states_of(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the numbers, texts and arrays that callbacks hold, for a checkpoint."""
    return [
        {name: kept for name, value in vars(callback).items() if name not in _NO_STATE for kept in _kept(value)}
        for callback in callbacks
    ]


def put_states(callbacks: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Restore the states of `states_of`, after `on_train_begin`, in which callbacks reset their values."""
    for callback, state in zip(callbacks, states, strict=False):
        if getattr(callback, "monitor_op", False) is None and state.get("best") is not None:
            callback._set_monitor_op()  # Before the state is set, as it changes the sign of min_delta, too.
        for name, value in state.items():
            setattr(callback, name, value)


def _kept(value: Any) -> list[Any]:
    """Return a list of the value if a checkpoint holds it, else an empty one."""
    if isinstance(value, bool | int | float | str | None) or type(value) is np.ndarray:
        return [value]
    if isinstance(value, np.generic):
        return [value.item()]
    if isinstance(value, list | tuple):
        items = [_kept(item) for item in value]
        return [[item for kept in items for item in kept]] if all(items) else []
    return []


def diverged(epoch: int, step: int) -> TrainingDiverged:
    """Return the error for a loss that is NaN or infinite, of this epoch and step from 0."""
    rank = None
    return TrainingDiverged(
        f"The loss is NaN or infinite: epoch {epoch + 1}, step {step + 1}. Look for values that are not finite in the "
        "model or the loss (the logarithm or quotient of a zero), lower the learning rate, clip the gradients "
        "(clipnorm of the optimizer), or scale the features.",
        epoch=epoch + 1,
        step=step + 1,
        rank=rank,
        column=None,
    )
