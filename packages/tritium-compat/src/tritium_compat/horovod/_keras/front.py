"""What `horovod.keras` and `horovod.tensorflow.keras` have in common: both are fronts of one Keras each (rank)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tritium_compat.horovod._keras import values
from tritium_compat.horovod._keras.optimizer import distribute
from tritium_compat.horovod.basics import Average, ProcessSet, global_process_set
from tritium_compat.horovod.options import Options, variables_of


def distributed(optimizer: Any, name: str | None, **options: Any) -> Any:
    """Return an optimizer like this one, which reduces gradients over all ranks before it applies them.

    options : see `Options`.
    """
    return distribute(optimizer, Options(name=name or f"Distributed{type(optimizer).__name__}", **options))


class Front:
    """The functions of a front that don't differ but in its Keras, its tensors and its `Compression.none`."""

    def __init__(self, keras: Any, tensor: Callable[[Any], Any], uncompressed: Any) -> None:
        self._keras, self._tensor, self._uncompressed = keras, tensor, uncompressed

    def PartialDistributedOptimizer(
        self,
        optimizer: Any,
        name: str | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: str = Average,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        local_layers: Any = None,
        scale_local_gradients: bool = True,
    ) -> Any:
        """Return such an optimizer that leaves gradients of `local_layers` to each rank, divided by their number."""
        local = variables_of(local_layers)
        made = distributed(
            optimizer,
            name=name,
            compression=compression or self._uncompressed,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
        for variable in local:
            made.register_local_var(variable)
        return made

    def broadcast_global_variables(self, root_rank: int) -> None:
        """Say that eager mode has no global variables. Raises RuntimeError."""
        raise RuntimeError(
            "hvd.broadcast_global_variables() has no variables to send in eager mode. Give fit() the callback "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0)."
        )

    def allreduce(
        self,
        value: Any,
        name: str | None = None,
        average: Any = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        op: Any = None,
        compression: Any = None,
    ) -> Any:
        """Return the average over all ranks, or what `op` says, of a tensor or what can become one."""
        compression = compression or self._uncompressed
        sent, kind = compression.compress(self._tensor(value))
        found = self._tensor(values.allreduce(sent, name, average, prescale_factor, postscale_factor, op))
        return compression.decompress(found, kind)

    def allgather(self, value: Any, name: str | None = None) -> Any:
        """Return the values of all ranks, concatenated along their first dimension, which may differ."""
        return self._tensor(values.allgather(value, name))

    def broadcast(self, value: Any, root_rank: int, name: str | None = None) -> Any:
        """Return the value of `root_rank`."""
        return self._tensor(values.broadcast(value, root_rank, name))

    def reducescatter(self, value: Any, name: str | None = None, op: Any = Average) -> Any:
        """Return this rank's part of the rows of the average, or sum, over all ranks."""
        return self._tensor(values.reducescatter(value, name, op))

    def load_model(
        self,
        filepath: Any,
        custom_optimizers: Iterable[type] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        compression: Any = None,
        legacy_opts: bool = False,
    ) -> Any:
        """Return a saved model whose optimizer has the state that was saved, and reduces gradients over all ranks.

        custom_optimizers : classes. custom_objects : name -> class or function. legacy_opts : is not needed.
        """
        custom = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
        model = self._keras.models.load_model(filepath, custom_objects=custom)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None:
            return model
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        name = f"Distributed{type(inner).__name__}"
        made = distributed(optimizer, name, compression=compression or self._uncompressed)
        if made is not optimizer:
            model.optimizer = made
        return model
