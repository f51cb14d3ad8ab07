"""`DistributedOptimizer` of `horovod.tensorflow`: for optimizers of Keras, and of TensorFlow 1 (rank)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tritium_compat.horovod.basics import Adasum, Average, ProcessSet, global_process_set
from tritium_compat.horovod.options import Options, groups_of
from tritium_compat.horovod.tensorflow.compression import Compression
from tritium_compat.horovod.tensorflow.gradients import Reducer


class _OfTensorFlow1(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of TensorFlow 1 whose `compute_gradients` reduces over all ranks."""

    def __init__(self, optimizer: Any, options: Options, use_locking: bool) -> None:
        super().__init__(name=options.name, use_locking=use_locking)
        self._optimizer, self._reducer = optimizer, Reducer(options)

    def register_local_var(self, var: Any) -> None:
        """Leave the gradients of this variable to this rank."""
        self._reducer.register_local_var(var)

    def compute_gradients(self, *args: Any, **options: Any) -> Any:
        """Return pairs of gradient and variable, reduced."""
        gradients, variables = zip(*self._optimizer.compute_gradients(*args, **options), strict=True)
        return list(zip(self._reducer.reduce(gradients, variables), variables, strict=True))

    def apply_gradients(self, *args: Any, **options: Any) -> Any:
        """Apply gradients as the optimizer does."""
        return self._optimizer.apply_gradients(*args, **options)

    def get_slot(self, *args: Any, **options: Any) -> Any:
        """Return a slot of the optimizer."""
        return self._optimizer.get_slot(*args, **options)

    def get_slot_names(self, *args: Any, **options: Any) -> Any:
        """Return the names of its slots."""
        return self._optimizer.get_slot_names(*args, **options)

    def variables(self, *args: Any, **options: Any) -> Any:
        """Return its variables."""
        return self._optimizer.variables(*args, **options)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer like this one, which reduces gradients over all ranks before it applies them.

    optimizer : of Keras 3, tf_keras or tf.compat.v1.train. The arguments mean what they mean in Horovod;
        `device_dense` and `device_sparse` have no effect.
    """
    from tritium_compat.horovod._keras.optimizer import distribute

    is_old = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if op == Adasum and is_old:
        raise NotImplementedError(
            "DistributedOptimizer(op=hvd.Adasum): not there for optimizers of TensorFlow 1. Use op=hvd.Average."
        )
    options = Options(
        name=name or f"Distributed{type(optimizer).__name__}",
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )
    if not is_old:
        return distribute(optimizer, options)
    if backward_passes_per_step > 1:
        raise NotImplementedError(
            "DistributedOptimizer(backward_passes_per_step=…): not there for optimizers of TensorFlow 1 "
            "(tf.compat.v1.train). Use one of Keras, or larger batches."
        )
    return _OfTensorFlow1(optimizer, options, use_locking)
