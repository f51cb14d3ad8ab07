"""Find the rows that the codec refuses: for a null, a NaN, an unknown word, or something else (any process)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium.data.schema import Field
from tritium.data.spool import Array
from tritium.errors import BadRow
from tritium.spark.inside import unsafe


def mark_unreadable(read: Callable[[Array], Any], valid: Array) -> None:
    """Set to False in `valid`, bool `[rows]`, the rows for which `read(rows)` raises BadRow.

    The rows are halved until each such row is known. Those that `invalid` finds, which may be many, are marked before.
    """

    def find(rows: Array) -> None:
        try:
            read(rows)
        except BadRow:
            if len(rows) == 1:
                valid[rows] = False
            else:
                for half in np.array_split(rows, 2):
                    find(half)

    find(np.flatnonzero(valid))


def invalid(field: Field, column: pa.Array) -> Array:
    """Return a bool `[rows]`: True for a row with a null, a NaN, an unknown word, or an array of another length.

    Rows may be refused for other reasons, too.

    column : as `codec.read` takes it.
    """
    if field.kind != "bytes" and unsafe.is_bytes(column):
        column = unsafe.lists(column, np.dtype(field.travel), field.depth)
    wrong = np.zeros(len(column), np.bool_)
    refused = np.array([fill is None for fill in field.nulls])
    rows = np.arange(len(column))
    for level in range(1 if field.kind == "bytes" else field.depth):
        if column.null_count:
            nulls: Array = column.is_null().to_numpy(zero_copy_only=False)
            if level or refused[0]:
                wrong[rows[nulls]] = True
            rows, column = rows[~nulls], column.drop_null()
        if field.kind == "bytes":
            return wrong
        counts: Array = pc.list_value_length(column).to_numpy()
        fit = _fit(field, level, counts)
        if not fit.all():  # Marks, whose values belong to no source, go here, too: see `exchange.pack`.
            wrong[rows[~fit]] = True
            rows, counts, column = rows[fit], counts[fit], column.filter(pa.array(fit))
        rows = np.repeat(rows, counts)
        column = column.flatten()
    if column.null_count:
        holes = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        wrong[rows[holes[refused[holes % len(refused)]]]] = True
    if field.nan == "error" and pa.types.is_floating(column.type):
        values: Any = column.fill_null(0).to_numpy(zero_copy_only=False)
        wrong[rows[~np.isfinite(values)]] = True
    if field.vocabulary is not None and not field.unknown:
        encoded, known = column.dictionary_encode(), {*field.vocabulary, None}
        unknown = np.array([word not in known for word in encoded.dictionary.to_pylist()], np.bool_)
        present = encoded.is_valid().to_numpy(zero_copy_only=False)
        wrong[rows[present][unknown[encoded.indices.drop_null().to_numpy()]]] = True
    return wrong


def _fit(field: Field, level: int, counts: Array) -> Array:
    """Return a bool `[k]`: whether arrays of these lengths, at this depth of a column, have the length of its rows."""
    if field.pad is not None:
        return counts <= field.pad[0]
    length = None if field.shape is None else field.shape[level]
    return np.ones(len(counts), np.bool_) if length is None else counts == length
