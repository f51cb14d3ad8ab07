"""`DistributedGradientTape`: gradients that are reduced over the ranks as they are asked for (rank)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tritium_compat.horovod.basics import Average, ProcessSet, global_process_set
from tritium_compat.horovod.options import Options, groups_of, variables_of
from tritium_compat.horovod.tensorflow.compression import Compression
from tritium_compat.horovod.tensorflow.gradients import Reducer


class _Distributed:
    """What is put before the class of a tape."""

    _reducer: Reducer

    def register_local_source(self, source: Any) -> None:
        """Leave the gradients of this variable to this rank."""
        self._reducer.register_local_var(source)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **options: Any) -> Any:
        """Return the gradients, reduced over all ranks."""
        options.pop("use_generic_names", None)
        own = super().gradient(target, sources, output_gradients, *args, **options)  # type: ignore[misc]
        flat = tf.nest.flatten(sources)
        reduced = self._reducer.reduce(own if isinstance(own, list) else _flat(own, len(flat)), flat)
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(self, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        """Return pairs of variable and gradient: of those that stay local, and of the others."""
        pairs = list(zip(sources, self.gradient(target, sources, *args, **options), strict=True))
        local = [pair for pair in pairs if self._reducer.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reducer.is_local(pair[0])]


def _flat(gradients: Any, count: int) -> list[Any]:
    """Return gradients in the order of their sources; tf.nest would take IndexedSlices apart, or lose None."""
    if count == 1 and not isinstance(gradients, list | tuple | dict):
        return [gradients]
    found = list(tf.nest.flatten(gradients))
    assert len(found) == count
    return found


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape like this one, whose `gradient` is reduced over all ranks, by one request.

    The arguments mean what they mean in Horovod; `device_dense` and `device_sparse` have no effect.
    """
    options = Options(
        name="DistributedGradientTape",
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    kind = type(gradtape)
    made: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__}))
    made.__dict__.update(gradtape.__dict__)
    made._reducer = Reducer(options)
    return made


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return such a tape that leaves the gradients of `local_layers` to each rank, divided by the number of ranks."""
    local = variables_of(local_layers)
    made = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in local:
        made.register_local_source(variable)
    return made
