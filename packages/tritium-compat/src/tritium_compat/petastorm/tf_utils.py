"""`petastorm.tf_utils`: a reader as a tf.data.Dataset, or as tensors of a TensorFlow 1 graph (any process)."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import tensorflow as tf

from tritium_compat.petastorm.unischema import Unischema, UnischemaField

_TYPES = {
    np.int8: tf.int8,
    np.int16: tf.int16,
    np.int32: tf.int32,
    np.int64: tf.int64,
    np.uint8: tf.uint8,
    np.uint16: tf.int32,
    np.uint32: tf.int64,
    np.float16: tf.float16,
    np.float32: tf.float32,
    np.float64: tf.float64,
    np.bytes_: tf.string,
    np.str_: tf.string,
    np.bool_: tf.bool,
    Decimal: tf.string,
    np.datetime64: tf.int64,
}
_AGAIN = (
    "Petastorm's reader begins again for another pass over its tf.data.Dataset. Say num_epochs= to the reader, or "
    "cache() the dataset."
)


def tf_type(field: UnischemaField) -> Any:
    """Return TensorFlow's type of a field: strings of decimals, nanoseconds since 1970 of times."""
    kind = field.numpy_dtype if field.numpy_dtype in _TYPES else np.dtype(field.numpy_dtype).type
    if kind not in _TYPES:
        raise ValueError(f"The field {field.name!r} has the type {field.numpy_dtype}, which TensorFlow has not.")
    return _TYPES[kind]


def for_tensorflow(row: Any) -> tuple[Any, ...]:
    """Return the values of a row or batch as TensorFlow takes them."""
    return tuple(_value(name, value) for name, value in row._asdict().items())


def _value(name: str, value: Any) -> Any:
    if value is None:
        raise RuntimeError(
            f"The field {name!r} is None, and a tensor can't hold it. Leave such rows out by a predicate."
        )
    if isinstance(value, Decimal):
        return str(value.normalize())
    if isinstance(value, np.datetime64):
        return value.astype("datetime64[ns]").astype(np.int64)
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "M":
        return value.astype("datetime64[ns]").astype(np.int64)
    if value.dtype == np.uint16:
        return value.astype(np.int32)
    if value.dtype == np.uint32:
        return value.astype(np.int64)
    if value.dtype.kind in "SU":
        return value.astype(object)  # else numpy's padding stays in TensorFlow's strings
    if value.dtype == object and len(value):
        return _objects(name, value)
    return value


def _objects(name: str, values: Any) -> Any:
    if any(value is None for value in values.flat):
        raise RuntimeError(f"The field {name!r} has nulls, and a tensor can't hold them. Leave them out by filters=.")
    if isinstance(values[0], Decimal):
        return np.array([str(value.normalize()) for value in values], object)
    if isinstance(values[0], datetime.date):
        return values.astype("datetime64[ns]").astype(np.int64)
    return values


def make_petastorm_dataset(reader: Any) -> Any:
    """Return a tf.data.Dataset of a reader's rows or batches: named tuples of tensors, of n-grams a dict of them."""

    def rows() -> Iterator[tuple[Any, ...]]:
        if reader.last_row_consumed:
            warnings.warn(_AGAIN, stacklevel=2)
            reader.reset()
        for row in reader:
            yield _flat(reader, row)

    signature = tuple(tf.TensorSpec(None, tf_type(field)) for field in _fields(reader))
    dataset = tf.compat.v1.data.Dataset.from_generator(rows, output_signature=signature)
    return dataset.map(lambda *tensors: _structured(reader, tensors))


def tf_tensors(reader: Any, shuffling_queue_capacity: int = 0, min_after_dequeue: int = 0) -> Any:
    """Return tensors of a TensorFlow 1 graph, which are the reader's next row each time they are evaluated.

    shuffling_queue_capacity : rows wait in a shuffling queue of that many; 0: they stay in the reader's order.
    min_after_dequeue : how many rows are left in it at least.
    """
    if reader.batched_output and shuffling_queue_capacity > 0:
        raise ValueError("shuffling_queue_capacity is for rows. Of batches, say shuffle_rows=True to the reader.")
    types = [tf_type(field) for field in _fields(reader)]
    v1 = tf.compat.v1
    # py_func may call again before it has been asked for: a constant would be folded
    tensors = v1.py_func(lambda _: _flat(reader, next(reader)), [tf.constant(1)], types)
    if shuffling_queue_capacity > 0:
        queue = v1.RandomShuffleQueue(shuffling_queue_capacity, min_after_dequeue, types)
        queue.size(name="random_shuffling_queue_size")
        v1.train.add_queue_runner(v1.train.QueueRunner(queue, [queue.enqueue(tensors)]))
        tensors = queue.dequeue()
    return _structured(reader, tensors if isinstance(tensors, (list, tuple)) else [tensors])


def _steps(reader: Any) -> list[tuple[int, Unischema]]:
    """Return time step -> schema of an n-gram; one step of other rows."""
    if reader.ngram is None:
        return [(0, reader.schema)]
    first = min(reader.ngram.fields)
    steps = range(first, first + reader.ngram.length)
    return [(step, reader.ngram.get_schema_at_timestep(reader.schema, step)) for step in steps]


def _fields(reader: Any) -> list[UnischemaField]:
    return [field for _, schema in _steps(reader) for field in schema.fields.values()]


def _flat(reader: Any, row: Any) -> tuple[Any, ...]:
    if reader.ngram is None:
        return for_tensorflow(row)
    return tuple(value for step in sorted(row) for value in for_tensorflow(row[step]))


def _structured(reader: Any, tensors: Any) -> Any:
    """Return tensors as named tuples, with the shapes that the schema says."""
    left = iter(tensors)
    made = {}
    for step, schema in _steps(reader):
        values = []
        for field in schema.fields.values():
            tensor = next(left)
            if tensor.shape.rank is None:
                tensor.set_shape((None, *field.shape) if reader.batched_output else field.shape)
            values.append(tensor)
        made[step] = schema.make_namedtuple_tf(*values)
    return made[0] if reader.ngram is None else made
