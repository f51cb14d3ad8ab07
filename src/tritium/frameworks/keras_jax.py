"""Keras on JAX: each rank computes the gradients of its rows, which are averaged within the compiled step (rank)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tritium.errors import BadSetting
from tritium.frameworks.framework import Place
from tritium.frameworks.host_memory import HostMemory
from tritium.frameworks.jax import JAX

if TYPE_CHECKING:
    from tritium.frameworks.packed_batch import PackedBatch

AXIS = "rank"
NOT_EAGERLY = (
    "run_eagerly=True can't train on several ranks with Keras's JAX back end: a step of all ranks is one computation, "
    "which JAX would trace and compile again for seconds at each step. Look at steps with one rank, ranks=1, or on "
    "another back end."
)


def run(place: Place, function: Callable[[JaxRanks], Any]) -> Any:
    """Call the function with the ranks as JAX's processes, and Keras's training steps on the devices of all of them.

    A step is a `shard_map`: Keras computes each device's rows on their own, and only gradients and the moments of
    BatchNormalization are combined. To let XLA partition a step over all rows instead costs a collective for each
    variable: 100 ms for the 60 gradients (11 MB) of a network of embeddings by Gloo, where one collective takes 18.

    Evaluation and prediction, and the values of variables between epochs, stay each rank's own.
    """

    def call() -> Any:
        import jax

        able = place.device == "cpu" and jax.local_device_count() == 1
        able = able and find_spec("jax.experimental.buffer_callback") is not None
        memory = HostMemory.shared(place) if all(place.gather(able)) else None
        with closing(memory) if memory is not None else nullcontext():
            ranks = JaxRanks(place, memory)
            _hook(ranks)
            try:
                return function(ranks)
            except Exception as error:
                if memory is None or memory.failure is None or str(memory.failure) not in str(error):
                    raise
                # XLA has made a ValueError of the failure, whose text is the stack of the callback.
                raise memory.failure.with_traceback(error.__traceback__) from None

    return JAX().run(place, call)


class JaxRanks:
    """A mesh of the devices of all ranks, over which batches are split."""

    def __init__(self, place: Place, memory: HostMemory | None) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self._place = place
        self._rows: list[int] = []
        self._in_step = False
        self._mesh = Mesh(np.array(jax.devices()), (AXIS,))
        self._memory = memory
        self._shares = False
        """Whether the memory is still to be used in the step that is traced."""
        self._whole = NamedSharding(self._mesh, PartitionSpec())
        self._split = NamedSharding(self._mesh, PartitionSpec(AXIS))

    def check(self, model: Any) -> None:
        """Raise BadSetting for a model whose steps are not to be compiled."""
        if model.run_eagerly:
            raise BadSetting(NOT_EAGERLY, setting="run_eagerly")

    def agree(self) -> None:
        """Raise BadSetting, the same on every rank, where ranks gave batches of different sizes since the last call.

        JAX takes each batch for a part of an array whose parts have one size.
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
        """Return the gradients, averaged over the ranks; outside a training step, as they are."""
        if not self._in_step:
            return list(gradients)
        import jax

        present = [gradient for gradient in gradients if gradient is not None]
        if self._memory is not None and all(HostMemory.averages(gradient.dtype) for gradient in present):
            if not self._shares:
                raise _SecondMean
            self._shares = False
            means = iter(_mean_in_memory(present, self._memory))
        elif jax.default_backend() == "cpu":  # Gloo takes a millisecond for a collective, however small it is.
            means = iter(_mean_by_dtype(present, self._mesh.size))
        else:  # XLA combines NCCL's collectives, and overlaps them with backward.
            means = iter(jax.lax.pmean(present, AXIS))
        return [None if gradient is None else next(means) for gradient in gradients]

    def step(self, keras_step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a training step of Keras, `keras_step(state, batch) -> logs, state`, as one of all ranks' devices.

        The state is whole on each device. Only results that are computed of averages are the same on every device:
        logs and states of metrics are those of a device's rows.
        """
        import jax

        def of_own_rows(state: Any, packed: PackedBatch) -> Any:
            batch = packed.unpacked()
            self._in_step = self._shares = True
            try:
                return keras_step(state, batch)
            except _SecondMean:
                self._memory = None
                return keras_step(state, batch)
            finally:
                self._in_step = False

        whole, split = self._whole.spec, self._split.spec
        step: Callable[[Any, Any], Any] = jax.shard_map(
            of_own_rows, mesh=self._mesh, in_specs=(whole, split), out_specs=(whole, whole), check_vma=False
        )
        return step

    def moments(self, rows: Any, mean: Any, variance: Any) -> tuple[Any, Any]:
        """Return mean and variance over all devices' rows, from those of one device's rows.

        rows : the weight of this device's rows.
        """
        if not self._in_step:
            return mean, variance
        import jax
        import jax.numpy as jnp

        gathered = jax.lax.all_gather(jnp.stack([jnp.full_like(mean, rows), mean, variance]), AXIS)
        counts, means, variances = gathered[:, 0], gathered[:, 1], gathered[:, 2]
        parts = counts / jnp.maximum(counts.sum(0), 1e-7)
        mean = (parts * means).sum(0)
        return mean, (parts * (variances + jnp.square(means - mean))).sum(0)

    def joined(self, batch: Any) -> PackedBatch:
        """Return a rank's arrays `[b, …]` as its part of arrays `[size × b, …]`, as `step` takes them."""
        import jax

        from tritium.frameworks.packed_batch import PackedBatch, layout_of

        leaves, tree = jax.tree.flatten(batch)
        arrays = [np.asarray(leaf) for leaf in leaves]
        self._rows.append(len(arrays[0]))
        layout = layout_of(tree, tuple((array.dtype, array.shape) for array in arrays))
        packed, here = layout.packed(arrays), self._mesh.local_devices
        if len(here) > 1:
            return PackedBatch([jax.make_array_from_process_local_data(self._split, one) for one in packed], layout)
        shapes = [(self._mesh.size * len(one), *one.shape[1:]) for one in packed]
        whole = [
            jax.make_array_from_single_device_arrays(shape, self._split, [part])
            for shape, part in zip(shapes, jax.device_put(packed, here[0]), strict=True)
        ]
        return PackedBatch(whole, layout)

    def replicated(self, state: Any) -> Any:
        """Return a rank's arrays, which are the same on every rank, as global ones. Global ones stay as they are."""
        import jax

        here = self._mesh.local_devices
        only = {*here} if len(here) == 1 else None

        def place(value: Any) -> Any:
            if not value.is_fully_addressable:
                return value if value.is_fully_replicated else jax.device_put(value, self._whole)
            if value.devices() == only:  # This makes no copy.
                return jax.make_array_from_single_device_arrays(value.shape, self._whole, [value])
            return jax.make_array_from_process_local_data(self._whole, np.asarray(value), value.shape)

        return jax.tree.map(place, state)

    def committed(self, values: Any) -> Any:
        """Return new values on this rank's device, where `local` puts those that were trained."""
        import jax

        return jax.device_put(values, self._mesh.local_devices[0])

    def local(self, state: Any) -> Any:
        """Return this rank's copies of global arrays."""
        import jax

        def copy(value: Any) -> Any:
            if not isinstance(value, jax.Array) or value.is_fully_addressable:
                return value
            whole = value if value.is_fully_replicated else jax.device_put(value, self._whole)
            return whole.addressable_data(0)

        return jax.tree.map(copy, state)


class _SecondMean(Exception):
    """A step averages gradients twice, and XLA would not use the memory in one order on all ranks."""


def _mean_in_memory(gradients: Sequence[Any], memory: HostMemory) -> list[Any]:
    """Return the means of gradients over the ranks that share the memory. They are computed in XLA's own buffers."""
    import jax
    from jax.experimental.buffer_callback import buffer_callback

    def mean(_: Any, means: Sequence[Any], *__: Any) -> None:
        arrays = [np.asarray(buffer) for buffer in means]
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            memory.mean([array for array in arrays if array.dtype == dtype])

    shapes = [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in gradients]
    in_place = {number: number for number in range(len(shapes))}
    means: list[Any] = buffer_callback(mean, shapes, input_output_aliases=in_place)(*gradients)
    return means


def _mean_by_dtype(gradients: Sequence[Any], size: int) -> list[Any]:
    """Return the means of gradients over the `size` devices, by one collective for each dtype."""
    import jax
    import jax.numpy as jnp

    averages: list[Any] = [None] * len(gradients)
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        numbers = [number for number, gradient in enumerate(gradients) if gradient.dtype == dtype]
        flat = jnp.concatenate([gradients[number].ravel() for number in numbers])
        total = jax.lax.optimization_barrier(jax.lax.psum(flat, AXIS))
        ends = np.cumsum([gradients[number].size for number in numbers])[:-1]
        # Each part is divided on its own, so that the division is fused with the optimizer's update.
        for number, part in zip(numbers, jnp.split(total, ends), strict=True):
            averages[number] = (part / size).reshape(gradients[number].shape)
    return averages


def _hook(ranks: JaxRanks) -> None:
    import jax
    from keras.src.backend.jax.trainer import JAXTrainer

    make, sync = JAXTrainer.make_train_function, JAXTrainer.jax_state_sync
    make_test = JAXTrainer.make_test_function

    @functools.wraps(make)
    def make_train_function(trainer: Any, force: bool = False) -> None:
        if trainer.train_function is not None and not force:  # As train_on_batch finds it at each step.
            return
        own_step, of_class = trainer.train_step, "train_step" not in vars(trainer)
        trainer.train_step = ranks.step(own_step)  # Keras compiles the function that it finds there.
        compiles, trainer._jit_compile = trainer._jit_compile, True  # Else a shard_map compiles at each step.
        try:
            make(trainer, force)
        finally:
            trainer._jit_compile = compiles
            del trainer.train_step
            if not of_class:
                trainer.train_step = own_step
        whole_step = trainer.train_function

        def train_function(state: Any, iterator: Iterator[Any]) -> Any:
            logs, state = whole_step(ranks.replicated(state), map(ranks.joined, iterator))
            return ranks.local(logs), state

        trainer.train_function = train_function

    @functools.wraps(make_test)
    def make_test_function(trainer: Any, force: bool = False) -> None:
        if trainer.test_function is not None and not force:
            return
        make_test(trainer, force)
        whole_step = trainer.test_function

        def test_function(state: Any, iterator: Iterator[Any]) -> Any:
            *values, metrics = state
            # Metrics are new at the first batch; uncommitted, JAX would compile the step again for the second.
            return whole_step((*values, ranks.committed(metrics)), iterator)

        trainer.test_function = test_function

    @functools.wraps(sync)
    def jax_state_sync(trainer: Any) -> None:
        if getattr(trainer, "_jax_state", None):  # Keras's own dicts and lists are leaves to JAX.
            state = {name: list(values) for name, values in trainer._jax_state.items()}
            if any(isinstance(value, jax.Array) and value.is_deleted() for value in chain(*state.values())):
                return  # A step that has failed took them, and its error must not be hidden.
            trainer._jax_state = {name: ranks.local(values) for name, values in state.items()}
        sync(trainer)

    JAXTrainer.make_train_function = make_train_function
    JAXTrainer.make_test_function = make_test_function
    JAXTrainer.jax_state_sync = jax_state_sync
    _hook_normalization(ranks)


def _hook_normalization(ranks: JaxRanks) -> None:
    import keras

    normalization = keras.layers.BatchNormalization
    moments = normalization._moments

    @functools.wraps(moments)
    def moments_of_all(layer: Any, inputs: Any, mask: Any) -> Any:
        rows = 1.0 if mask is None else keras.ops.sum(keras.ops.cast(mask, inputs.dtype))
        return ranks.moments(rows, *moments(layer, inputs, mask))

    normalization._moments = moments_of_all
