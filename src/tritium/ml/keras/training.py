"""The training with Keras's `fit` (rank)."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tritium.checkpoint.training import Collective, Own, Shared, Stateful, TrainingCheckpoint
from tritium.data.epochs import Epoch
from tritium.errors import BadSetting
from tritium.frameworks.keras_fit import begin
from tritium.gang.rank.world import World
from tritium.gang.rank.world import world as this_world
from tritium.ml.dry_run import try_first_row
from tritium.ml.early_stopping import EarlyStoppingState
from tritium.ml.first_batch import notes
from tritium.ml.history import make_json
from tritium.ml.keras.callback import KerasCallbacks, TrainingCallback, of_this_rank
from tritium.ml.keras.checkpoint import CallbackStates, KerasWeights, random_state, set_random_state, shift_seeds
from tritium.ml.keras.dry_run import KerasDryRun, KerasFacts, build
from tritium.ml.keras.identity import identity
from tritium.ml.keras.labels import Classes
from tritium.ml.keras.metrics import MetricStates, count_rows
from tritium.ml.keras.portable import compile_arguments
from tritium.ml.keras.rows import EpochRows, Step
from tritium.ml.keras.settings import KerasSettings, refuse_ignored
from tritium.ml.progress import TrainingProgress
from tritium.model.engines.keras_form import Inputs, built, named_outputs, zeros
from tritium.model.engines.keras_here import set_random_seed
from tritium.model.engines.keras_weights import Variables, as_array
from tritium.model.safetensors import pieces
from tritium.model.signature import Output, check_classes

WEIGHTS = "weights.safetensors"


def train(
    settings: KerasSettings,
    validate: bool,
    facts: KerasFacts,
    user_run_dir: bool = False,
    identity_with_code: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Train on this rank's shards. Rank 0 stores the weights, and returns history, inputs and outputs; others None.

    facts : the result of the dry run on the driver.
    user_run_dir : whether the user named the run directory; a training that was begun there then continues.
    identity_with_code : the driver's description of this training, to be kept in its checkpoints.
    """
    world, chosen = this_world(), keras.backend.backend()
    if settings.backend not in (None, chosen):  # With on="here" Keras may have been imported before.
        raise BadSetting(
            f"Keras was imported on its back end {chosen!r} in this process, and backend={settings.backend!r}. Set "
            f'KERAS_BACKEND={settings.backend} before Keras is imported, or train with on="driver".',
            setting="backend",
        )
    return _KerasTraining(settings, validate, facts, user_run_dir, identity_with_code, world).run()


class _KerasTraining:
    """A training on this rank, from the settings to the weights."""

    def __init__(
        self,
        settings: KerasSettings,
        validate: bool,
        facts: KerasFacts,
        user_run_dir: bool,
        identity_with_code: dict[str, Any] | None,
        world: World,
    ) -> None:
        """Make the model, its metrics, callbacks and checkpoint, and read a checkpoint's history."""
        self.settings, self.validates, self.world = settings, validate, world
        self.batch_size = settings.rows_per_rank(world.size)
        self.shard = shard = world.shard("train")
        if validate:
            settings.check_validation_rows(world.shard("validation").counts)
        first = next(shard.epochs(1, batch_size=self.batch_size, device=None, **settings.order()))
        if not facts.tried:
            facts = try_first_row(KerasDryRun, settings, world)
        set_random_seed(settings.seed)
        self.inputs, self.classes = facts.inputs, facts.classes
        self.model = model = built(settings.compiled(settings.make_model()), self.inputs)
        refuse_ignored(compile_arguments(model).get("loss"), world.size)
        batch = self._rows(first)[0]
        build(model, batch)
        world.expect_file(WEIGHTS, sum(as_array(variable).nbytes for variable in model.weights))
        shift_seeds(model, settings.seed, world.rank)
        count_rows(model)
        begin(model)
        self.states = MetricStates(model, world)
        best = (lambda: weights_of(model), lambda weights: put_weights(model, weights))
        tell = world.note if world.rank == 0 else lambda _: None
        self.early_stopping = EarlyStoppingState(settings.stopping_rule(), settings.epochs, *best, tell)
        this = identity(settings, model, shard.schema)
        self.history: list[dict[str, Any]] = []
        identities = {"identity": this, "identity_with_code": identity_with_code}
        about = (self.history, self.early_stopping, self._parts())
        self.checkpoint = TrainingCheckpoint(world, settings, identities, *about, run_dir_required=user_run_dir)
        saved = self.checkpoint.load()
        if saved is not None:
            self.weights.path = saved.path
        elif world.rank == 0:
            for line in notes(settings, by_name(settings, batch), model._flatten_layers()):
                tell(line)
        self.progress = TrainingProgress(settings, world)
        self.together = TrainingCallback(self.states, self.progress, self._on_step, self._on_epoch_end)
        callbacks = of_this_rank(settings.callbacks, world.rank)
        self.callbacks = KerasCallbacks(self.together, callbacks, model, settings.epochs)

    def _parts(self) -> dict[str, Stateful]:
        """Return what a checkpoint keeps of this training, in the order in which it is restored."""
        settings, world, early_stopping = self.settings, self.world, self.early_stopping
        self.seconds: float | None = None
        """The seconds of the epoch so far; None between epochs."""
        self.random: Mapping[str, Any] | None = None
        """The state of the generators, to be restored in the first epoch."""
        self.weights, self.position = KerasWeights(self.model, world), Collective(self.shard.state)
        self.callback_states = CallbackStates(settings.callbacks, self.model)
        self.sums = Collective(lambda: None if self.seconds is None else (self.states.now(), self.seconds))
        return {
            "weights": self.weights,
            "callbacks": self.callback_states,
            "best": Shared(lambda: early_stopping.weights, early_stopping.load_weights),
            "metrics": self.sums,
            "random": Own(world.rank, random_state, lambda kept: setattr(self, "random", kept), world.size),
            "position": self.position,
        }

    def run(self) -> dict[str, Any] | None:
        """Take all epochs. Rank 0 stores the weights, and returns history, inputs and outputs; others None."""
        model, callbacks, checkpoint = self.model, self.callbacks, self.checkpoint
        callbacks.begin()
        checkpoint.restore()
        sums = self.sums.restored
        if sums is not None:
            self.together.resumed = self.states.share([None if one is None else one[0] for one in sums])
            self.together.seconds_before = max(0.0 if one is None else one[1] for one in sums)
        order = self.settings.order() | {"batch_size": self.batch_size, "device": None}
        self.step = checkpoint.step
        for epoch in self.shard.epochs(checkpoint.rounds, **order, resume=self.position.restored):
            self._take(epoch)
            epoch.end()
            self.progress.on_epoch_end(epoch, self.history[-1])
            if any(self.world.gather(callbacks.stop or self.early_stopping.should_stop)):
                break
            checkpoint.regroup(self.step)
        checkpoint.finish(self.step)
        model.optimizer.finalize_variable_values(model.trainable_variables)  # Applies the averages of use_ema=True.
        self.early_stopping.restore_best()
        callbacks.end(dict(self.history[-1]) if self.history else {})
        take_buffers(model, self.world)
        if self.world.rank != 0:
            return None
        self.world.store(WEIGHTS, pieces(Variables.of(model).stream()))
        outputs = outputs_of(model, self.inputs, self.settings)
        return {"history": self.history, "inputs": dict(self.inputs), "outputs": outputs}

    def _rows(self, epoch: Epoch) -> EpochRows:
        return EpochRows(self.settings, epoch, self.world.rank, self.batch_size, self.classes)

    def _take(self, epoch: Epoch) -> None:
        """Take the steps that are left of an epoch; the first one continues as the checkpoint says."""
        together = self.together
        rows = together.rows = self._rows(epoch)
        if epoch.first:
            self.callbacks.after_epoch_begin = self.callback_states.after_epoch_begin
        else:
            together.resumed = None
        if self.random is not None:
            restore_random = functools.partial(set_random_state, self.random)
            self.random = None
            if epoch.first and len(rows):
                together.before_first_step = restore_random  # Not now, as torch draws for its iterator.
            else:
                restore_random()
        train_epoch(self.model, rows, self.callbacks)

    def _on_step(self, _: Step) -> None:
        self.step, self.seconds = self.step + 1, self.together.seconds()
        self.checkpoint.save(self.step)
        self.seconds = None

    def _on_epoch_end(self, entry: dict[str, Any]) -> Mapping[str, Any]:
        """Validate, add to the epoch's entry in the history, and return the validation's logs by Keras's names."""
        take_buffers(self.model, self.world)  # The returned model has rank 0's, so all ranks validate with them.
        later: Mapping[str, Any] = {}
        if self.validates:
            later = validation(self.settings, self.world, self.states, self.callbacks, self.classes)
        rate = entry.pop("learning_rate")
        entry |= {f"validation_{name}": value for name, value in later.items()} | {"learning_rate": rate}
        make_json(entry)
        self.history.append(entry)
        self.early_stopping.on_epoch_end(entry)
        return {f"val_{name}": value for name, value in later.items()}


def train_epoch(model: Any, rows: EpochRows, callbacks: KerasCallbacks) -> None:
    """Run `fit` for the rest of an epoch. Each epoch is a `fit`, so that one that continues is like any other."""
    number = rows.epoch.number
    if not len(rows):  # Its last step was taken before the checkpoint.
        callbacks.on_epoch_begin(number)
        callbacks.on_epoch_end(number, {})
        return
    finalize = model.optimizer.finalize_variable_values
    # It is called at the end of the training, not of each epoch.
    model.optimizer.finalize_variable_values = lambda variables: None
    try:
        model.fit(rows, initial_epoch=number, epochs=number + 1, callbacks=callbacks, verbose=0, shuffle=False)
    finally:
        model.optimizer.finalize_variable_values = finalize


def by_name(settings: KerasSettings, batch: Sequence[Any]) -> dict[str, Any]:
    """Return inputs and labels of a batch for `fit`, by their names."""
    columns: dict[str, Any] = {}
    for part, names in zip(batch, (settings.inputs(), settings.label_sources()), strict=False):
        columns |= part if isinstance(part, Mapping) else {next(iter(names)): part}
    return columns


def validation(
    settings: KerasSettings, world: World, states: MetricStates, callbacks: KerasCallbacks, classes: Classes
) -> dict[str, Any]:
    """Return loss and metrics over the validation rows of all ranks. A rank without such rows evaluates nothing."""
    shard, batch_size = world.shard("validation"), settings.rows_per_rank(world.size)
    model = callbacks.model_to_stop
    every_row = dataclasses.replace(settings, remainder="pad")
    model.reset_metrics()
    if shard.rows:
        rows_in_order = shard.alone().epochs(1, batch_size=batch_size, shuffle=False, remainder="pad", device=None)
        for epoch in rows_in_order:
            rows = EpochRows(every_row, epoch, 0, batch_size, classes)
            model.evaluate(rows, verbose=0, callbacks=callbacks, return_dict=True)
            epoch.end()
    return states.merge()


def take_buffers(model: Any, world: World) -> None:
    """Give every rank the statistics of rank 0's rows, such as BatchNorm's, where they differ. A collective call."""
    if world.size == 1:
        return
    trained = {id(variable) for variable in model.trainable_variables}
    others = {number: v for number, v in enumerate(model.weights) if id(v) not in trained}
    digests = world.gather({number: digest(v) for number, v in others.items()})
    differ = [number for number in others if any(of_rank[number] != digests[0][number] for of_rank in digests)]
    if differ:
        values = {number: np.array(as_array(others[number])) for number in differ} if world.rank == 0 else None
        for number, value in world.gather(values)[0].items():
            others[number].assign(value)


def digest(variable: Any) -> int:
    """Return a checksum of a variable's value."""
    return zlib.crc32(np.ascontiguousarray(as_array(variable)).tobytes())


def weights_of(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return a copy of the model's weights by their numbers."""
    return {str(number): np.array(as_array(variable)) for number, variable in enumerate(model.weights)}


def put_weights(model: Any, weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Set the weights that `weights_of` returned."""
    for number, value in weights.items():
        model.weights[int(number)].assign(value)


def outputs_of(model: Any, inputs: Inputs, settings: KerasSettings) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and row shape of the model's outputs for a prediction, by name."""
    batch = zeros(inputs)
    result = model.predict_on_batch(next(iter(batch.values())) if len(batch) == 1 else batch)
    arrays = {name: np.asarray(value) for name, value in named_outputs(model, result).items()}
    outputs = {name: (value.dtype.name, tuple(value.shape[1:])) for name, value in arrays.items()}
    if settings.task == "classification":
        check_classes([Output(name, dtype, shape) for name, (dtype, shape) in outputs.items()])
    return outputs
