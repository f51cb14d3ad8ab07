"""How gradients are exchanged: the arguments that the fronts for TensorFlow and Keras share (rank)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritium_compat.horovod.basics import Adasum, Average, ProcessSet, Sum, global_process_set


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `DistributedOptimizer` and `DistributedGradientTape` are given, by the names of their arguments."""

    name: str
    """By which ranks find each other's gradients."""
    compression: Any
    sparse_as_dense: bool = False
    op: str = Average
    gradient_predivide_factor: float = 1.0
    """The sum is divided by this before, and by what is left of the number of ranks after."""
    groups: Any = None
    """A number of requests, or lists of variables that are sent together; None: all in one request."""
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    """Whether gradients that stay local are divided by the number of ranks."""
    backward_passes_per_step: int = 1
    """Backward passes of which gradients are summed before they are exchanged."""
    average_aggregated_gradients: bool = False
    """Whether that sum is divided by their number."""

    def __post_init__(self) -> None:
        """Raise ValueError for what does not go together."""
        if self.op == Adasum:
            raise ValueError(
                "op=hvd.Adasum is not there for gradients of TensorFlow and Keras. Use op=hvd.Average; "
                "hvd.allreduce(tensor, op=hvd.Adasum) and horovod.torch have it."
            )
        if self.op not in (Average, Sum):
            raise ValueError(f"op={self.op!r}: gradients are combined by hvd.Average or hvd.Sum.")
        if self.gradient_predivide_factor != 1 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.groups is not None and not (isinstance(self.groups, list) or self.groups > 0):
            raise ValueError("groups should be a non-negative integer or a list of list of variables.")
        if self.backward_passes_per_step < 1:
            raise ValueError("backward_passes_per_step must be > 0")

    @property
    def scales(self) -> tuple[float, float]:
        """What gradients are multiplied by before and after they are summed."""
        return (
            (1 / self.gradient_predivide_factor, self.gradient_predivide_factor) if self.op == Average else (1.0, 1.0)
        )

    def alone(self) -> bool:
        """Return whether this rank has no other one to exchange gradients with."""
        return not self.process_set.included() or self.process_set.size() == 1

    def parts(self, variables: Sequence[Any]) -> list[list[int]]:
        """Return the places of the variables that are sent together, one list for each request."""
        every = list(range(len(variables)))
        if self.groups is None:
            return [every]
        if not isinstance(self.groups, list):
            size = -(-len(every) // self.groups)
            return [every[start : start + size] for start in range(0, len(every), size or 1)]
        given = [[n for n in every if any(variables[n] is one for one in group)] for group in self.groups]
        taken = {n for part in given for n in part}
        return [*filter(None, given), *([n] for n in every if n not in taken)]


def groups_of(groups: Any, num_groups: int) -> Any:
    """Return what the arguments `num_groups`, which is deprecated, and `groups` mean."""
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=3,
        )
        return num_groups if groups is None else groups
    return groups


def variables_of(layers: Any) -> list[Any]:
    """Return the trainable variables of one layer or several. Raises ValueError for what is none."""
    listed = [] if layers is None else list(layers) if isinstance(layers, list | tuple | set) else [layers]
    if not all(hasattr(layer, "trainable_weights") for layer in listed):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    return [variable for layer in listed for variable in layer.trainable_weights]
