"""Splits a frame into the rows to train on and those to validate on (driver)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tritium.data.types import columns_of, is_spark, spark_column
from tritium.errors import BadData, BadSetting
from tritium.hints import suggest
from tritium.ml.columns import as_frame, find_columns, names_in, schema_of, table_column
from tritium.ml.settings import Settings

_PARTS = 1 << 32  # range of the hash for the validation fraction


def split(frame: Any, settings: Settings) -> tuple[Any, Any]:
    """Return the rows to train on and those to validate on (None: there are none). Raises BadData and BadSetting."""
    given = settings.validation
    if given is None:
        return frame, None
    if not isinstance(given, str | float | int):
        other = as_frame(given, "validation")
        if is_spark(other) != is_spark(frame):
            raise BadSetting(
                f"validation is a {type(given).__name__}, and the data to train on a {type(frame).__name__}."
            )
        return frame, other
    if isinstance(given, str):
        chosen = _marked(frame, given)
    else:
        names = [name for source in find_columns(frame, settings).sources.values() for name in names_in(source)]
        if settings.together is not None:
            names = [settings.together]
        chosen = _hashed(frame, list(dict.fromkeys(names)), float(given), settings.seed)
    if is_spark(frame):
        return frame.where(~chosen), frame.where(chosen)
    return frame.filter(pc.invert(chosen)), frame.filter(chosen)


def _marked(frame: Any, name: str) -> Any:
    known = columns_of(schema_of(frame))
    if name not in known:
        raise BadData(f"validation column {name!r} is missing.{suggest(name, known)}")
    if known[name].dtype != "bool":
        raise BadData(f"validation column {name!r} is {known[name].text}; it must be boolean (True: validate).")
    null = f"validation column {name!r} holds a null; it must be True (validate) or False (train)"
    if not is_spark(frame):
        if frame[name].null_count:
            raise BadData(f"{null}.")
        return frame[name]
    from pyspark.sql import functions as F

    value = spark_column(frame.schema, name)
    return F.when(value.isNull(), F.raise_error(F.lit(null)).cast("boolean")).otherwise(value)


def _hashed(frame: Any, names: Sequence[str], fraction: float, seed: int) -> Any:
    """Return a boolean column that is True for about this fraction of the rows, and equal for equal rows."""
    limit = int(fraction * _PARTS)
    if is_spark(frame):
        from pyspark.sql import functions as F

        drawn = F.xxhash64(F.lit(seed), *(spark_column(frame.schema, name) for name in names))
        return F.pmod(drawn, F.lit(_PARTS)) < limit
    start = zlib.crc32(str(seed).encode())
    rows = zip(*(table_column(frame, name).to_pylist() for name in names), strict=True)
    return pa.array([zlib.crc32(repr(row).encode(), start) < limit for row in rows], pa.bool_())
