"""The training checkpoint: the state from which a training continues, saved and restored (rank)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from tritium.checkpoint.identity import refuse_another
from tritium.errors import BadSetting, ModelError
from tritium.gang.rank.world import World
from tritium.ml.early_stopping import EarlyStoppingState, stays_stopped
from tritium.ml.keras.callback import put_states, states_of
from tritium.ml.keras.metrics import MetricStates, sync
from tritium.ml.keras.settings import KerasSettings
from tritium.model.engines.keras_weights import as_array, put

_SEEDS = "seed_generator_state"
_RATE = "learning_rate"


@dataclass
class State:
    """What a checkpoint holds the state of."""

    settings: KerasSettings
    world: World
    shard: Any
    model: Any
    states: MetricStates
    early_stopping: EarlyStoppingState
    identity: dict[str, Any]
    identity_with_code: dict[str, Any] | None
    history: list[dict[str, Any]] = field(default_factory=list)


class TrainingCheckpoint:
    """The state of a training, saved as often as the settings say, and restored from an earlier attempt or run.

    `run_dir_required`: the user named the run directory, so it is an error when a rank does not reach it. Otherwise a
    training whose ranks do not share a disk runs without checkpoints, and logs that.
    """

    def __init__(self, state: State, *, run_dir_required: bool) -> None:
        self._state, self._settings, self._world = state, state.settings, state.world
        self._saved: Any = None
        self._on, self._run_dir_required = self._settings.checkpoint_every is not None, run_dir_required
        self._finished = self._stopped = False
        self._step = 0
        self.metrics: Sequence[np.ndarray[Any, Any]] | None = None
        """The states of metrics with which the first epoch continues; None where it begins."""
        self.seconds = 0.0
        self.random: Mapping[str, Any] | None = None
        """The states of the process's random generators, of which each new iterator over rows draws a number."""
        self.after_epoch_begin: Callable[[], None] | None = None
        """Restores what callbacks change at the beginning of an epoch that continues, a learning rate above all."""

    def load(self) -> list[dict[str, Any]] | None:
        """Read the newest checkpoint, restore the history, and return all ranks' positions; None without a checkpoint.

        `put_back` restores the rest. A collective call. Raises BadSetting for the checkpoint of another training.
        """
        if not self._on:
            return None
        try:
            saved = self._world.checkpoint.load()
        except BadSetting as error:
            if self._run_dir_required:
                raise
            self._on = False
            if self._world.rank == 0:
                self._world.note(f"no checkpoints, so a retry starts from the beginning: {error}")
            return None
        if saved is None:
            return None
        state = self._state
        refuse_another(saved.get("identity"), state.identity, saved.path, resized=saved.size != self._world.size)
        state.history[:] = saved["history"]
        state.early_stopping.load_state_dict(saved["early_stopping"], len(state.history))
        self._saved, self._step = saved, saved.step
        self._stopped = stays_stopped(saved["stopped"], saved["early_stopping"], self._settings.stopping_rule())
        self._finished = saved["finished"] and self.epochs == len(state.history)
        return [own["position"] for own in saved.own]

    def put_back(self) -> None:
        """Restore weights, optimizer and callbacks, after these were told that the training begins."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        state, world = self._state, self._world
        weights, optimizer = state.model.weights, state.model.optimizer.variables
        try:
            put(weights, _restored(saved["weights"], weights))
            put(optimizer, _restored(saved["optimizer"], optimizer))
        except ModelError as error:
            raise BadSetting(f"{saved.path} is a checkpoint of another training: {error}") from error
        rates = [(variable, np.array(as_array(variable))) for variable in optimizer if variable.path.endswith(_RATE)]

        def after_epoch_begin() -> None:
            put_states(self._settings.callbacks, saved["callbacks"])
            for variable, value in rates:
                variable.assign(value)

        put_states(self._settings.callbacks, saved["callbacks"])
        self.after_epoch_begin = after_epoch_begin
        if saved.size == world.size:
            own = saved.own[world.rank]
            for number, value in own["weights"].items():
                weights[int(number)].assign(_restored([value], [weights[int(number)]])[0])
            put(_seeds(state.model), own["seeds"])
            self.random = own["random"]
        self.metrics = state.states.share([own["metrics"] for own in saved.own])
        self.seconds = max(own["seconds"] for own in saved.own)

    @property
    def epochs(self) -> int:
        """The number of epochs in all: those that were done, if a callback or early stopping has ended the training."""
        return len(self._state.history) if self._stopped else self._settings.epochs

    def on_step(self, seconds: float) -> None:
        """Count an optimizer step, and save when `checkpoint_every` says so. `seconds`: of this epoch so far."""
        self._step += 1
        if self._on:
            self._world.checkpoint.save(
                self._replicated,
                self._step,
                own=lambda: self._own(self._state.states.now(), seconds),
                every=self._settings.checkpoint_every,
                keep=self._settings.checkpoint_keep,
            )

    def on_epoch_end(self) -> None:
        """Save and start again between two epochs, if the gang could be larger."""
        if self._on and len(self._state.history) < self.epochs:
            keep = self._settings.checkpoint_keep
            self._world.checkpoint.regroup(self._replicated, self._step, own=lambda: self._own(None, 0.0), keep=keep)

    def on_train_end(self) -> None:
        """Save after the last epoch, so that a later fit with this run directory finds the training finished."""
        if self._on and self._run_dir_required and not self._finished:
            self._finished, self._stopped = True, len(self._state.history) < self._settings.epochs
            keep = self._settings.checkpoint_keep
            self._world.checkpoint.save(self._replicated, self._step, own=lambda: self._own(None, 0.0), keep=keep)

    # ---- what is saved

    def _replicated(self) -> dict[str, Any]:
        state = self._state
        sync(state.model)
        return {
            "identity": state.identity,
            "identity_with_code": state.identity_with_code,
            "weights": _kept(state.model.weights),
            "optimizer": _kept(state.model.optimizer.variables),
            "callbacks": states_of(self._settings.callbacks),
            "early_stopping": state.early_stopping.state_dict(),
            "epochs": self._settings.epochs,
            "history": state.history,
            "finished": self._finished,
            "stopped": self._stopped,
        }

    def _own(self, metrics: Any, seconds: float) -> dict[str, Any]:
        model = self._state.model
        sync(model)
        trained = {id(variable) for variable in model.trainable_variables}
        own = {str(n): v for n, v in enumerate(model.weights) if self._world.rank and id(v) not in trained}
        return {
            "position": self._state.shard.state(),
            "weights": {number: _kept([v])[0] for number, v in own.items()},  # those of rank 0 are in the common state
            "seeds": [np.array(as_array(variable)) for variable in _seeds(model)],
            "random": random_state(),
            "metrics": metrics,
            "seconds": seconds,
        }


def shift_seeds(model: Any, seed: int, rank: int) -> None:
    """Let a model draw other random numbers on each rank, so that dropout differs from rank to rank."""
    if keras.backend.backend() == "torch":  # of whose generator a layer without a seed draws
        import torch

        torch.manual_seed(seed + rank)
    for variable in _seeds(model):
        state = np.array(as_array(variable))
        state[0] += rank
        variable.assign(state)


def random_state() -> dict[str, Any]:
    """Return the states of the generators of Python and NumPy, and of torch where it is the back end."""
    state: dict[str, Any] = {"numpy": np.random.get_state(), "python": random.getstate()}
    if keras.backend.backend() == "torch":
        import torch

        state["torch"] = torch.get_rng_state().numpy()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned."""
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "torch" in state:
        import torch

        torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))


def _seeds(model: Any) -> list[Any]:
    """Return the states of the generators in a model's layers."""
    return [variable for variable in model.variables if variable.path.endswith(_SEEDS)]


def _kept(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Return the variables' values as a checkpoint holds them: bfloat16 and the like, which NumPy lacks, as bytes."""
    arrays = [np.array(as_array(variable), order="C") for variable in variables]  # keeps arrays without dimensions
    return [array if np.dtype(array.dtype.str) == array.dtype else array.view(np.uint8) for array in arrays]


def _restored(arrays: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the values that `_kept` was given."""
    found = []
    for array, variable in zip(arrays, variables, strict=False):
        dtype = as_array(variable).dtype
        found.append(array if np.dtype(dtype.str) == dtype else array.view(dtype))
    return [*found, *arrays[len(found) :]]
