"""How a collective of NumPy arrays becomes an op of TensorFlow, in eager mode and in graphs (rank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tritium_compat.horovod.errors import HorovodInternalError

Call = Callable[[list[Any], str | None], list[Any]]


class CollectiveError(HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """A collective that can't be done, as TensorFlow's own error as well as Horovod's."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


def collective(
    call: Call, kind: str, tensors: Sequence[Any], outputs: Sequence[tuple[Any, Any]], name: str | None
) -> list[Any]:
    """Do a collective now, or add it to the graph that is being made.

    call : does it, with arrays and a name.
    outputs : dtype and shape of each tensor that it returns.
    name : by which ranks find each other's. Without one they are counted: as they are called, in eager mode and in a
        tf.function, which calls them one after the other; as they are made, in a graph of TensorFlow 1.
    """
    if tf.executing_eagerly():
        try:
            found = call([tensor._numpy() for tensor in tensors], name)
        except HorovodInternalError as error:
            raise CollectiveError(str(error)) from error
        return [tf.convert_to_tensor(array, dtype) for array, (dtype, _) in zip(found, outputs, strict=True)]
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise NotImplementedError(
            f"{kind} of Tritium's Horovod can't be compiled by XLA. Give jit_compile=False to compile(), and leave "
            "jit_compile=True out of tf.function around it."
        )
    if name is None and not graph.building_function:
        name = graph.unique_name(f"Horovod{kind}")
    made = tf.numpy_function(
        lambda *arrays: call(list(arrays), name), list(tensors), [dtype for dtype, _ in outputs], name=f"Horovod{kind}"
    )
    for tensor, (_, shape) in zip(made, outputs, strict=True):
        tensor.set_shape(shape)
    return list(made)


def same(tensors: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the outputs of a collective that changes no shape."""
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def free_rows(tensors: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the outputs of a collective that changes the number of rows."""
    return [(tensor.dtype, tf.TensorShape([None]).concatenate(tensor.shape[1:])) for tensor in tensors]


def now(value: Callable[[], int]) -> Any:
    """Return an op with a number that is asked for whenever it runs (int32)."""
    import numpy as np

    return tf.numpy_function(lambda: np.int32(value()), [], tf.int32)
