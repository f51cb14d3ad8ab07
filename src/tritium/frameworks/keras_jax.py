"""Keras on JAX: a training step is one computation over the devices of all ranks (rank)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tritium.frameworks.framework import Place
from tritium.frameworks.ports import held_ports


@contextmanager
def connected(place: Place) -> Iterator[JaxRanks]:
    """Initialize jax.distributed, and let Keras's training steps run on all ranks' devices.

    Evaluation and prediction, and the values of variables between epochs, stay each rank's own.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    own = [place.local_rank] if place.device.startswith("cuda") else None
    with held_ports(place) as addresses:
        jax.distributed.initialize(addresses[0], place.size, place.rank, local_device_ids=own)
    ranks = JaxRanks()
    _hook(ranks)
    yield ranks
    place.barrier()  # a rank that ended would end the service that the others still use
    jax.distributed.shutdown()


class JaxRanks:
    """A mesh of the devices of all ranks, over which batches are split."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()), ("rank",))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec("rank"))

    def check(self, model: Any) -> None:
        """Do nothing: every model can be trained."""

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
