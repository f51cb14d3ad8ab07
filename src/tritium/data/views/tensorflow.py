"""The batches of a shard as a `tf.data.Dataset` (rank)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tritium.data.batch import Batch, filled
from tritium.data.epochs import Epoch
from tritium.data.spool import Array, RaggedView
from tritium.errors import BadSetting
from tritium.hints import did_you_mean

WEIGHT = "sample_weight"
_PASSED_ON = ("apply", "cache", "enumerate", "map", "prefetch", "repeat", "skip", "take", "with_options")


class Elements:
    """The form of a batch as an element of a dataset: tensors of one shape in every step.

    name    : the name of the shard.
    size    : the number of shards.
    columns : names, nested as the element shall be; None: a dict of all, with the weights.
    read    : column → its dtype and its shape without the batch, for every column of the shard.
    weigh   : whether there may be short batches, so that the element must have weights.

    Raises BadSetting for a column that does not exist, and where `columns` has no place for the weights.
    """

    def __init__(
        self, name: str, size: int, batch_size: int, columns: Any, read: dict[str, tuple[Any, Any]], weigh: bool
    ) -> None:
        self._size, self._batch_size = size, batch_size
        if WEIGHT in read:
            raise BadSetting(f"shard {name!r}: a column is called {WEIGHT!r}, as the weights are. Rename it.")
        if columns is None:
            columns = {column: column for column in (*read, *((WEIGHT,) if weigh else ()))}
        elif weigh and isinstance(columns, tuple) and len(columns) == 2:
            columns = (*columns, WEIGHT)
        self._columns = columns
        flat = tf.nest.flatten(columns)
        for column in flat:
            if column not in read and column != WEIGHT:
                hint = did_you_mean(str(column), list(read))
                raise BadSetting(f"shard {name!r} has no column {column!r}; it has {', '.join(read)}.{hint}")
        if weigh and WEIGHT not in flat:
            raise BadSetting(
                f"shard {name!r}: with remainder='pad' the last batches are filled up with repeated rows, and columns="
                f"{columns!r} has no place for their weights. Give two columns, inputs and targets (the weights come "
                f"third); or name {WEIGHT!r} in columns=; or take remainder='drop' or 'repeat'."
            )
        read = {**read, WEIGHT: (np.float32, ())}
        self.spec = tf.nest.map_structure(
            lambda column: tf.TensorSpec((batch_size, *read[column][1]), read[column][0]), columns
        )

    def of(self, batch: Batch) -> Any:
        """Return the batch in the structure of `spec`. Rows that fill it up are repeated, and weigh 0.

        The others weigh the same, so much that the average over ranks of the mean over each rank's batch_size rows is
        the mean over all rows of the step.
        """
        weights = np.zeros(self._batch_size, np.float32)
        weights[: batch.rows] = self._size * self._batch_size / batch.total
        return tf.nest.map_structure(
            lambda column: weights if column == WEIGHT else filled(batch[column], self._batch_size), self._columns
        )


def types(columns: dict[str, Array | RaggedView], decode: dict[str, Callable[[bytes], Any]]) -> dict[str, Any]:
    """Return column → dtype and shape of a row. Of bytes that are decoded, they are those of the first row."""
    types_of: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            types_of[name] = column.dtype, column.shape[1:]
        elif name in decode:
            first = np.asarray(decode[name](column.take(np.zeros(1, np.int64)).values.tobytes()))
            types_of[name] = first.dtype, first.shape
        else:
            types_of[name] = tf.string, ()
    return types_of


def dataset(epochs: Iterator[Epoch], elements: Elements, size: int, steps: int | None) -> Any:
    """Return a dataset of which each iteration is the next of `epochs`.

    size  : the number of shards.
    steps : those of each epoch; None where they differ or are not yet known.
    """

    def batches() -> Iterator[Any]:
        for batch in next(epochs):
            yield elements.of(batch)

    elements_of_epochs = tf.data.Dataset.from_generator(batches, output_signature=elements.spec)
    if steps is not None:
        elements_of_epochs = elements_of_epochs.apply(tf.data.experimental.assert_cardinality(steps))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return _own(elements_of_epochs.with_options(options), size)


def _own(dataset: Any, size: int) -> Any:
    """Let distribution strategies take a dataset's batches as those of this rank.

    For `model.fit(dataset)` they would divide each batch by the number of all ranks, as if it were of all.
    """
    kind = type(dataset)

    def rebatch(self: Any, batch_size: Any, *args: Any, **settings: Any) -> Any:
        replicas = len(batch_size) // size
        if replicas <= 1:
            return self
        return kind.rebatch(self, sum(batch_size) // replicas, *args, **settings)

    def passed_on(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        @functools.wraps(method)
        def call(*args: Any, **settings: Any) -> Any:
            return _own(method(*args, **settings), size)

        return call

    dataset.__class__ = type(kind.__name__, (kind,), {"rebatch": rebatch, **{n: passed_on(n) for n in _PASSED_ON}})
    return dataset
