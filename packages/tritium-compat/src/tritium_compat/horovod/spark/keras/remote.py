"""The training of `horovod.spark.keras` by Keras's `fit` (rank)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import keras
import numpy as np

from tritium.integration.keras import PortableModel, begin_fit, of_this_rank, set_random_seed
from tritium_compat.horovod.spark.common.training import Rank, Rows
from tritium_compat.horovod.spark.keras.models import compiled, learning_rate, put_state, shape_of

_HOROVOD = "tritium_compat.horovod."


def train(rank: Rank, model: PortableModel, arguments: Mapping[str, Any], state: Sequence[Any], resumed: bool) -> Any:
    """Train, and return on rank 0 (history, weights of the checkpoint, state of the optimizer, size)."""
    settings = rank.settings
    callbacks = list(settings.callbacks)
    watched = [*callbacks, settings.checkpoint_callback]
    if any(type(callback).__module__.startswith(_HOROVOD) for callback in watched):
        import tritium_compat.horovod.torch as hvd

        hvd.init()
    if settings.random_seed is not None:
        set_random_seed(settings.random_seed)
    made = compiled(model.model(), arguments, settings.custom_objects)
    put_state(made.optimizer, made, state)
    rate = learning_rate(made.optimizer)
    if rate is not None and not resumed:
        rate *= rank.world.size
        made.optimizer.learning_rate = rate
    for callback in callbacks:
        if type(callback).__module__.startswith(_HOROVOD) and hasattr(callback, "initial_lr"):
            callback.initial_lr = rate
    begin_fit(made)
    with rank.store.get_local_output_dir() as directory:
        file = os.path.join(directory, file_name(rank.store.checkpoint_filename, settings.checkpoint_callback))
        if rank.is_first:
            callbacks = with_files(callbacks, rank, directory, file)
        else:
            callbacks = of_this_rank(callbacks, rank.world.rank)
        begun = "continues from the checkpoint of its run_id" if resumed else "begins"
        rank.note(f"the training {begun}: {rank.rows('train')} rows, learning rate {rate}")
        history = fit(made, rank, callbacks)
        if rank.is_first and os.path.exists(file):
            made.load_weights(file)
    if not rank.is_first:
        return None
    weights = [keras.ops.convert_to_numpy(one) for one in made.weights]
    variables = [keras.ops.convert_to_numpy(one) for one in made.optimizer.variables]
    return history, weights, variables, rank.world.size


def fit(model: Any, rank: Rank, callbacks: Sequence[Any]) -> dict[str, list[float]]:
    """Call `fit`, and return its history."""
    settings = rank.settings
    batches = Batches(model, rank)
    later = None
    if rank.validates:
        later = Steps(batches.of(rank.validation_rows()), rank.steps(math.ceil, "validation"))
    result = model.fit(
        Steps(batches.of(rank.train_rows()), rank.steps(math.ceil)),
        epochs=settings.epochs,
        validation_data=later,
        callbacks=list(callbacks),
        verbose=2 if rank.verbose else 0,
        shuffle=False,
    )
    return {name: [float(value) for value in values] for name, values in result.history.items()}


class Steps(keras.utils.PyDataset):  # type: ignore[misc]
    """A number of batches in each epoch, the next ones in turn. Of a generator, Keras evaluates too few steps."""

    def __init__(self, batches: Iterator[Any], steps: int) -> None:
        super().__init__()
        self._batches, self._steps = batches, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Any:
        return next(self._batches)


class Batches:
    """Makes of rows what `fit` takes: inputs in the order of feature_cols, labels in that of label_cols, weights."""

    def __init__(self, model: Any, rank: Rank) -> None:
        self._settings = rank.settings
        self._inputs = [(shape_of(one), str(one.dtype)) for one in model.inputs]
        self._labels = rank.settings.label_shapes or [shape_of(one) for one in model.outputs]
        self._outputs = len(model.outputs)

    def of(self, rows: Iterator[Rows]) -> Iterator[Any]:
        """Return the batches of these rows."""
        settings = self._settings
        for batch in rows:
            pairs = zip(settings.feature_cols, self._inputs, strict=True)
            inputs = tuple(batch[name].reshape(shape).astype(dtype, copy=False) for name, (shape, dtype) in pairs)
            labels = tuple(
                _reshaped(batch[name], shape) for name, shape in zip(settings.label_cols, self._labels, strict=True)
            )
            given: tuple[Any, ...] = (
                inputs[0] if len(inputs) == 1 else inputs,
                labels[0] if len(labels) == 1 else labels,
            )
            if settings.sample_weight_col:
                weights = batch[settings.sample_weight_col].reshape(-1)
                given = (*given, weights if self._outputs == 1 else (weights,) * self._outputs)
            yield given


def _reshaped(values: np.ndarray[Any, Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return labels in this shape; a class index keeps its own, where the output has a score for each class."""
    return values.reshape(shape) if values[0].size == abs(math.prod(shape)) else values.reshape(len(values), -1)


def file_name(name: str, callback: Any) -> str:
    """Return the name of the checkpoint with the ending that Keras asks for."""
    ending = ".weights.h5" if getattr(callback, "save_weights_only", False) else ".keras"
    return name if name.endswith(ending) else name + ending


def with_files(callbacks: list[Any], rank: Rank, directory: str, file: str) -> list[Any]:
    """Return the callbacks of rank 0: the user's, a checkpoint, TensorBoard's logs, and the upload to the store."""
    checkpoint = rank.settings.checkpoint_callback
    if checkpoint is None:
        checkpoint = keras.callbacks.ModelCheckpoint(file)
    checkpoint.filepath = file
    callbacks = [*callbacks, checkpoint]
    if not rank.store.saving_runs:
        return callbacks
    logs = os.path.join(directory, rank.store.logs_subdir)
    boards = [one for one in callbacks if isinstance(one, keras.callbacks.TensorBoard)][:1]
    if boards:
        callbacks = [one for one in callbacks if one is not boards[0]]
        boards[0].log_dir = logs
    elif keras.backend.backend() == "tensorflow" and find_spec("tensorboard") is not None:
        boards = [keras.callbacks.TensorBoard(logs)]
    return [*callbacks, *boards, Upload(rank.store.sync, directory)]


class Upload(keras.callbacks.Callback):  # type: ignore[misc]
    """Brings a local directory to the store after each epoch."""

    def __init__(self, sync: Any, directory: str) -> None:
        super().__init__()
        self._sync, self._directory = sync, directory

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Upload what has changed."""
        self._sync(self._directory)

    def on_train_end(self, logs: Any = None) -> None:
        """Upload what has changed."""
        self._sync(self._directory)
