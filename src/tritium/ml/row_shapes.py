"""The shapes of the rows of batch columns, from types, plans and, where that costs little, the first row (driver)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tritium.arguments import name_of
from tritium.data.decode import by_batch_column, raw_image
from tritium.data.schema import Field
from tritium.data.tables import column_of
from tritium.data.types import IMAGE_SIZE, is_spark, spark_column
from tritium.errors import BadSetting
from tritium.ml.dry_run import needs_rank, text_of
from tritium.ml.settings import Settings
from tritium.spark.inside.plans import array_length, is_at_hand


def with_shapes(frame: Any, fields: Mapping[str, Field], settings: Settings) -> dict[str, Field]:
    """Return the batch columns with the shapes of their rows, those of decoded values with their dtype.

    The shape of an array, a vector or a decoded value is that of the first row, which is read where Spark has it at
    hand: of files, small local data, or what is cached, through projections alone. It stays None elsewhere.

    Raises BadSetting for a function of `decode` with an error that no value explains.
    """
    known = {name: field if field.shape is not None else _of_type(frame, field) for name, field in fields.items()}
    unknown = {name: field for name, field in known.items() if field.shape is None}
    if settings.tries and unknown and (row := _first_row(frame, [field.sources[0] for field in unknown.values()])):
        decoders = by_batch_column(settings.decode or {}, list(fields.values()))
        for name, field in unknown.items():
            value = row[field.sources[0]]
            if value is not None and field.content == "image":
                value = raw_image(*(value[one] for one in (*IMAGE_SIZE, "data")))
            if value is not None and field.kind == "bytes":
                known[name] = _decoded(field, value, decoders[name].function)
            elif value is not None:
                known[name] = dataclasses.replace(field, shape=_shape(value))
    return known


def _of_type(frame: Any, field: Field) -> Field:
    """Return the field with the length that a vector's metadata or the plan of an array has, where they do."""
    if not is_spark(frame) or field.depth != 1 or field.kind != "fixed":
        return field
    source = field.sources[0]
    lengths = [f.metadata.get("ml_attr", {}).get("num_attrs") for f in frame.schema.fields if f.name == source]
    length = lengths[0] if lengths and lengths[0] else array_length(frame, spark_column(frame.schema, source))
    return field if length is None else dataclasses.replace(field, shape=(int(length),))


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a vector or of nested lists; None where these differ in length, or hold nothing."""
    try:
        shape = (int(value.size),) if hasattr(value, "toArray") else np.array(value).shape
    except ValueError:  # They are lists of several lengths.
        return None
    return None if 0 in shape else shape


def _decoded(field: Field, value: Any, decode: Any) -> Field:
    """Return the field with shape and dtype of the array that `decode` makes of a value; as it is if unknown."""
    raw = bytes(value) if isinstance(value, bytearray) else value
    try:
        array = np.asarray(decode(raw) if callable(decode) else decode[raw])
    except Exception as error:
        if needs_rank(error) or not isinstance(error, TypeError | AttributeError | NameError):
            return field  # The rank says it of the row, if it is to be said.
        raise BadSetting(
            f"decode={{{field.sources[0]!r}: {name_of(decode)}}} fails for the first value: {text_of(error)}",
            setting="decode",
        ) from error
    if array.dtype.kind not in "fiub":
        return field
    return dataclasses.replace(field, shape=array.shape, dtype=array.dtype.name)


def _first_row(frame: Any, columns: list[str]) -> dict[str, Any] | None:
    """Return the first row's values of these columns; None where there is none, or it is not at hand."""
    if not is_spark(frame):
        if not frame.num_rows:
            return None
        first = frame.slice(0, 1)
        return {name: column_of(first, name).to_pylist()[0] for name in columns}
    chosen = frame.select(*(spark_column(frame.schema, name).alias(f"c{i}") for i, name in enumerate(columns)))
    if not is_at_hand(chosen):
        return None
    rows = chosen.limit(1).collect()
    return dict(zip(columns, rows[0], strict=True)) if rows else None
