"""Variables of Keras models, of any back end (rank)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tritium_compat.horovod import arrays
from tritium_compat.horovod.basics import global_process_set


def weights(model: Any) -> list[Any]:
    """Return the weights of a model and the variables of its optimizer; not the state of its random numbers."""
    return [*model.weights, *optimizer_variables(model.optimizer)]


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer, which are a property or a method."""
    found = getattr(optimizer, "variables", ())
    return list(found() if callable(found) else found)


def values(variables: Sequence[Any]) -> list[Any]:
    """Return arrays of the variables' values."""
    return [variable.numpy() for variable in variables]


def broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Give all ranks the values of `root_rank`, by one request."""
    own = [np.asarray(value) for value in values(variables)]
    found = arrays.broadcast(own, root_rank, None, global_process_set)
    for variable, value in zip(variables, found, strict=True):
        variable.assign(value)


def names_of(optimizer: Any) -> Any:
    """Return the optimizer that has the learning rate and momentum: the one within a LossScaleOptimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)
