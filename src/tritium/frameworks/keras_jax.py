"""Keras on JAX: a training step is one computation over the devices of all ranks (rank)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tritium.errors import BadSetting
from tritium.frameworks.framework import Place
from tritium.frameworks.jax import JAX


def run(place: Place, function: Callable[[JaxRanks], Any]) -> Any:
    """Call the function with the ranks as JAX's processes, and Keras's training steps on the devices of all of them.

    Evaluation and prediction, and the values of variables between epochs, stay each rank's own.
    """

    def call() -> Any:
        ranks = JaxRanks(place)
        _hook(ranks)
        return function(ranks)

    return JAX().run(place, call)


class JaxRanks:
    """A mesh of the devices of all ranks, over which batches are split."""

    def __init__(self, place: Place) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self._place = place
        self._rows: list[int] = []
        mesh = Mesh(np.array(jax.devices()), ("rank",))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec("rank"))

    def check(self, model: Any) -> None:
        """Do nothing: every model can be trained."""

    def agree(self) -> None:
        """Raise BadSetting, the same on every rank, where ranks gave batches of different sizes since the last call.

        Such ranks have computed different updates, as each took its own size for that of all.
        """
        every = self._place.gather(self._rows)
        self._rows = []
        for rank, rows in enumerate(every):
            if rows != every[0]:
                step = next(n for n, pair in enumerate(zip(every[0], rows, strict=True)) if pair[0] != pair[1])
                raise BadSetting(
                    f"The batches of step {step} have {every[0][step]} rows on rank 0 and {rows[step]} on rank {rank}: "
                    "on Keras's JAX back end, a step needs batches of one size. Take them from "
                    'world.shard("train").keras(…), which fills them up, or train on as many rows on every rank.'
                )

    def broadcast(self, values: Sequence[Any]) -> list[Any]:
        """Return rank 0's arrays."""
        from jax.experimental import multihost_utils

        return list(multihost_utils.broadcast_one_to_all(tuple(values)))

    def mean(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients as they are: the loss of a step is the mean over the batches of all ranks."""
        return list(gradients)

    def joined(self, batch: Any) -> Any:
        """Return a rank's arrays `[b, …]` as its part of arrays `[size × b, …]`."""
        import jax

        self._rows.append(jax.tree.leaves(batch)[0].shape[0])
        return jax.tree.map(lambda a: jax.make_array_from_process_local_data(self._split, np.asarray(a)), batch)

    def replicated(self, state: Any) -> Any:
        """Return a rank's arrays, which are the same on every rank, as global ones. Global ones stay as they are."""
        import jax

        def place(value: Any) -> Any:
            if value.is_fully_addressable:
                return jax.make_array_from_process_local_data(self._whole, np.asarray(value), value.shape)
            return value if value.is_fully_replicated else jax.device_put(value, self._whole)

        return jax.tree.map(place, state)

    def local(self, state: Any) -> Any:
        """Return this rank's copies of global arrays."""
        import jax

        def copy(value: Any) -> Any:
            if not isinstance(value, jax.Array) or value.is_fully_addressable:
                return value
            whole = value if value.is_fully_replicated else jax.device_put(value, self._whole)
            return whole.addressable_data(0)

        return jax.tree.map(copy, state)


def _hook(ranks: JaxRanks) -> None:
    from keras.src.backend.jax.trainer import JAXTrainer

    make, sync = JAXTrainer.make_train_function, JAXTrainer.jax_state_sync

    @functools.wraps(make)
    def make_train_function(trainer: Any, force: bool = False) -> None:
        before = trainer.train_function
        make(trainer, force)
        own = trainer.train_function
        if own is before:
            return

        def train_function(state: Any, iterator: Iterator[Any]) -> Any:
            logs, state = own(ranks.replicated(state), map(ranks.joined, iterator))
            return ranks.local(logs), state

        trainer.train_function = train_function

    @functools.wraps(sync)
    def jax_state_sync(trainer: Any) -> None:
        if getattr(trainer, "_jax_state", None):
            trainer._jax_state = ranks.local(trainer._jax_state)
        sync(trainer)

    JAXTrainer.make_train_function = make_train_function
    JAXTrainer.jax_state_sync = jax_state_sync
