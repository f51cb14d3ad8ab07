"""Columns of Arrow as numpy arrays, of the kinds that Petastorm returns (any process)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium_compat.petastorm.arrow_schema import is_list
from tritium_compat.petastorm.unischema import UnischemaField


def as_array(column: Any, field: UnischemaField) -> Any:
    """Return a column (`pa.ChunkedArray`) as an array of its rows: [rows], or [rows, *shape] of lists.

    Integers with nulls become float64 with NaN. ValueError where lists have different lengths.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if is_list(column.type):
        return _lists(column, field)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.to_pandas().to_numpy(object).astype(np.str_) if len(column) else np.empty(0, np.str_)
    if not column.null_count and (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        return column.to_numpy()
    return column.to_pandas().to_numpy()


def _lists(column: Any, field: UnischemaField) -> Any:
    if column.null_count:
        raise ValueError(
            f"The column {field.name!r} has {column.null_count} nulls among its lists, so its rows can't be one array. "
            "Filter them out, or fill them in a TransformSpec."
        )
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) > 1:
        some = ", ".join(map(str, sorted(lengths)[:5]))
        raise ValueError(
            f"The lists of the column {field.name!r} have different lengths ({some}), so its rows can't be one array. "
            "Make them equal in a TransformSpec, or leave the column out by schema_fields."
        )
    width = lengths[0] if lengths else 0
    values = as_array(pc.list_flatten(column), field)
    shape = field.shape if len(field.shape) > 1 and None not in field.shape else (width,)
    return values.reshape(len(column), *shape)


def from_frame(values: Any, field: UnischemaField) -> Any:
    """Return a column of the DataFrame that a TransformSpec returned as an array of its rows."""
    if values.dtype != object:
        return values.to_numpy()
    first = next((value for value in values if value is not None), None)
    if isinstance(first, (np.ndarray, list, tuple)):
        return _stacked(values, field)
    if isinstance(first, str):
        return values.to_numpy().astype(np.str_)
    return values.to_numpy()


def _stacked(values: Any, field: UnischemaField) -> Any:
    arrays = [np.asarray(value) for value in values]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ValueError(
            f"The TransformSpec returns arrays of different shapes in the column {field.name!r}: "
            f"{', '.join(map(str, sorted(shapes)[:5]))}. They must be equal to be one batch."
        )
    shape = next(iter(shapes))
    if len(field.shape) > 1 and None not in field.shape and shape != tuple(field.shape):
        raise ValueError(
            f"The TransformSpec returns arrays of shape {shape} in the column {field.name!r}, and says {field.shape} "
            "in edit_fields."
        )
    return np.stack(arrays)
