"""Which rows hold a null, a NaN or an infinity, or something else that the codec refuses (any process)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium.data import unsafe
from tritium.data.schema import Field
from tritium.data.spool import Array
from tritium.errors import BadRow


def mark_unreadable(read: Callable[[Array], Any], valid: Array) -> None:
    """Set to False in `valid`, bool `[rows]`, the rows for which `read(rows)` raises BadRow.

    The rows are halved until it is known which they are: nulls and NaN, of which there may be many, are known before.
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
    """Return a bool `[rows]`: True for such a row. Rows may be refused for other reasons, too.

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
        rows = np.repeat(rows, pc.list_value_length(column).to_numpy())
        column = column.flatten()
    if column.null_count:
        holes = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        wrong[rows[holes[refused[holes % len(refused)]]]] = True
    if field.nan == "error" and pa.types.is_floating(column.type):
        values: Any = column.fill_null(0).to_numpy(zero_copy_only=False)
        wrong[rows[~np.isfinite(values)]] = True
    return wrong
