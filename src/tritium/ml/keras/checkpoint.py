"""What a checkpoint keeps of a training with Keras: weights, callbacks and random generators (rank)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tritium.errors import BadSetting, ModelError
from tritium.gang.rank.world import World
from tritium.ml.keras.callback import put_states, states_of
from tritium.ml.keras.metrics import sync
from tritium.model.engines.keras_weights import as_array, put

_SEEDS = "seed_generator_state"
_RATE = "learning_rate"


class KerasWeights:
    """The weights of the model and of its optimizer, and of each rank what is its own: statistics and generators."""

    def __init__(self, model: Any, world: World) -> None:
        self._model, self._world = model, world
        self.path = "The run directory"
        """Where the checkpoint is that is restored, for an error."""

    def shared(self) -> dict[str, Any]:
        sync(self._model)
        return {"weights": _kept(self._model.weights), "optimizer": _kept(self._model.optimizer.variables)}

    def own(self) -> dict[str, Any]:
        trained = {id(variable) for variable in self._model.trainable_variables}
        # Those of rank 0 are shared.
        others = {str(n): v for n, v in enumerate(self._model.weights) if self._world.rank and id(v) not in trained}
        return {
            "weights": {number: _kept([v])[0] for number, v in others.items()},
            "seeds": [np.array(as_array(variable)) for variable in _seeds(self._model)],
        }

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        weights, optimizer = self._model.weights, self._model.optimizer.variables
        try:
            put(weights, _restored(shared["weights"], weights))
            put(optimizer, _restored(shared["optimizer"], optimizer))
        except ModelError as error:
            raise BadSetting(f"{self.path} is a checkpoint of another training: {error}") from error
        if len(own) == self._world.size:
            mine = own[self._world.rank]
            for number, value in mine["weights"].items():
                weights[int(number)].assign(_restored([value], [weights[int(number)]])[0])
            put(_seeds(self._model), mine["seeds"])


class CallbackStates:
    """The states of the callbacks, which are equal on every rank."""

    def __init__(self, callbacks: Sequence[Any], model: Any) -> None:
        self._callbacks, self._model = callbacks, model
        self.after_epoch_begin: Callable[[], None] | None = None
        """Restores what callbacks change at the beginning of an epoch that continues, a learning rate above all."""

    def shared(self) -> list[dict[str, Any]]:
        return states_of(self._callbacks)

    def own(self) -> None:
        return None

    def restore(self, shared: Any, own: Sequence[Any]) -> None:
        """Restore the states, after the callbacks were told that the training begins, and the optimizer's."""
        variables = [variable for variable in self._model.optimizer.variables if variable.path.endswith(_RATE)]
        rates = [(variable, np.array(as_array(variable))) for variable in variables]

        def after_epoch_begin() -> None:
            put_states(self._callbacks, shared)
            for variable, value in rates:
                variable.assign(value)

        put_states(self._callbacks, shared)
        self.after_epoch_begin = after_epoch_begin


def shift_seeds(model: Any, seed: int, rank: int) -> None:
    """Let a model draw other random numbers on each rank, so that dropout differs from rank to rank."""
    if keras.backend.backend() == "torch":  # A layer without a seed draws of its generator.
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
    # Unlike ascontiguousarray, this keeps arrays without dimensions.
    arrays = [np.array(as_array(variable), order="C") for variable in variables]
    return [array if np.dtype(array.dtype.str) == array.dtype else array.view(np.uint8) for array in arrays]


def _restored(arrays: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the values that `_kept` was given."""
    values = []
    for array, variable in zip(arrays, variables, strict=False):
        dtype = as_array(variable).dtype
        values.append(array if np.dtype(dtype.str) == dtype else array.view(dtype))
    return [*values, *arrays[len(values) :]]
