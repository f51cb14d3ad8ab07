"""Stored values as the values of a row, by the codecs of their fields (any process)."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from tritium_compat.petastorm.codecs import ScalarCodec
from tritium_compat.petastorm.errors import DecodeFieldError
from tritium_compat.petastorm.unischema import Unischema, UnischemaField


def decode_table(table: Any, schema: Unischema) -> dict[str, list[Any]]:
    """Return the columns of an Arrow table as lists of decoded values."""
    return {name: _column(table.column(name), schema.fields[name]) for name in table.column_names}


def as_dicts(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return columns as rows."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def decode_row(row: Mapping[str, Any], schema: Unischema) -> dict[str, Any]:
    """Return a row of stored values decoded. Fields that the schema has not are left out."""
    return {name: _decoded(schema.fields[name], value) for name, value in row.items() if name in schema.fields}


def _column(column: Any, field: UnischemaField) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if field.codec is None or type(field.codec) is ScalarCodec:
        kind = field.numpy_dtype
        stored_as_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        # A null of a floating column is NaN, as pandas has it, by way of which Petastorm reads.
        if stored_as_number and _is_number(kind) and (not column.null_count or pa.types.is_floating(column.type)):
            return list(column.to_numpy().astype(kind, copy=False))
        if field.shape:
            return list(column.to_pandas())
    return [_decoded(field, value) for value in column.to_pylist()]


def _is_number(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, np.number)


def _decoded(field: UnischemaField, value: Any) -> Any:
    if value is None:
        return None
    try:
        if field.codec is not None:
            return field.codec.decode(field, value)
        if isinstance(field.numpy_dtype, type) and issubclass(field.numpy_dtype, (np.generic, Decimal)):
            return field.numpy_dtype(value)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise DecodeFieldError(
            f"A value of the field {field.name!r} can't be decoded by {field.codec}: {error}"
        ) from error
    return value
