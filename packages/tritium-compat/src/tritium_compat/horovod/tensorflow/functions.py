"""Sending variables of TensorFlow from one rank to all (rank)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tritium_compat.horovod.basics import ProcessSet, global_process_set
from tritium_compat.horovod.tensorflow.ops import send_all
from tritium_compat.horovod.torch import functions


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give all ranks the variables of `root_rank`, by one request.

    variables : of TensorFlow or Keras, of the same shapes and dtypes on all ranks.
    inplace : has no effect: there is one way.
    Returns an op that does it where a graph of TensorFlow 1 is made, else None.
    """
    listed = list(variables)
    if not listed:
        return tf.no_op() if _makes_graph() else None
    values = send_all([tf.convert_to_tensor(one) for one in listed], root_rank, None, process_set)
    assigned = [variable.assign(value) for variable, value in zip(listed, values, strict=True)]
    return tf.group(*assigned) if _makes_graph() else None


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Give all ranks the variables of `root_rank`, and return their values."""
    values = send_all([tf.convert_to_tensor(one) for one in variables], root_rank, name, process_set)
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    with tf.control_dependencies([] if tf.executing_eagerly() else [tf.group(*assigned)]):
        return [tf.identity(value) for value in values]


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an op that gives all ranks the global variables of `root_rank`, in a graph of TensorFlow 1.

    Raises RuntimeError in eager mode, which has no such variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() has no variables to send in eager mode. Call "
            "hvd.broadcast_variables(model.variables, root_rank=0), or give Keras's fit() "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all ranks the global variables of `root_rank` when a session of TensorFlow 1 begins."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Say whose variables are sent. device : has no effect."""
        self._root_rank = root_rank
        self._op: Any = None

    def begin(self) -> None:
        """Add the op to the graph."""
        if self._op is None or self._op.graph is not tf.compat.v1.get_default_graph():
            self._op = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self._op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of `root_rank`, which cloudpickle can copy. session : is not needed."""
    return functions.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return a function that returns the object of `root_rank` for its own."""
    return lambda obj: functions.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, which cloudpickle can copy. session : is not needed."""
    return functions.allgather_object(obj, name, process_set)


def _makes_graph() -> bool:
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function
