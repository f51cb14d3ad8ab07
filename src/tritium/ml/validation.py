"""Tells the rows to train on from those to validate on (driver)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium.data.fingerprint import mixed
from tritium.data.plan import unfit_together
from tritium.data.schema import Data
from tritium.data.tables import column_of
from tritium.data.types import columns_of, is_spark, spark_column
from tritium.errors import BadData, BadSetting
from tritium.hints import suggest
from tritium.ml.columns import as_frame, schema_of
from tritium.ml.settings import Settings

_PARTS = 1 << 32
"""The range of the hash for the validation fraction."""


@dataclass(frozen=True)
class Split:
    """Which rows are trained on, and which are validated on."""

    frame: Any
    """The rows to train on; with `held`, also those to validate on."""
    held: str | None = None
    """A boolean column of `frame`, without nulls: True for the rows to validate on."""
    other: Any = None
    """The rows to validate on where they are another frame."""
    drawn: bool = False
    """Whether `held` was drawn."""

    @property
    def words(self) -> Any:
        """The rows whose words are learnt: those to train on, but all where a draw decides which these are.

        Otherwise the draw would decide whether a rare word is unknown in the validation, which ends the training.
        """
        return self.frame if self.drawn else self.training

    @property
    def training(self) -> Any:
        """The rows to train on alone."""
        if self.held is None:
            return self.frame
        if is_spark(self.frame):
            return self.frame.where(~spark_column(self.frame.schema, self.held))
        return self.frame.filter(pc.invert(self.frame[self.held]))

    def data(self, data: Data) -> dict[str, Data]:
        """Return Data of `frame` for the rows to train on, and for those to validate on where they are in it, too.

        Both are read in one evaluation, so that no row is on both sides or on none.
        """
        if self.held is None:
            return {"train": data}
        sides = {"train": False, "validation": True}
        return {name: dataclasses.replace(data, where=(self.held, side)) for name, side in sides.items()}


def split(frame: Any, settings: Settings) -> Split:
    """Return which rows to train and to validate on. Raises BadData and BadSetting."""
    validation = settings.validation
    if validation is None:
        return Split(frame)
    if not isinstance(validation, str | float | int):
        other = as_frame(validation, "validation", settings.nulls)
        if is_spark(other) != is_spark(frame):
            raise BadSetting(
                f"validation is a {type(validation).__name__}, and the data to train on a {type(frame).__name__}."
            )
        return Split(frame, other=other)
    held = _marked(frame, validation) if isinstance(validation, str) else _drawn(frame, float(validation), settings)
    name = "_validation"
    while name in schema_of(frame).names:
        name = f"_{name}"
    frame = frame.withColumn(name, held) if is_spark(frame) else frame.append_column(name, held)
    return Split(frame, name, drawn=not isinstance(validation, str))


def _marked(frame: Any, name: str) -> Any:
    known = columns_of(schema_of(frame))
    if name not in known:
        raise BadData(f"validation column {name!r} is missing.{suggest(name, known)}")
    if known[name].dtype != "bool":
        raise BadData(f"validation column {name!r} is {known[name].text}; it must be boolean (True: validate).")
    return _whole(frame, name, f"validation column {name!r} holds a null; it must be True (validate) or False (train).")


def _whole(frame: Any, name: str, message: str) -> Any:
    """Return a column without nulls. A null is an error: here for a table, and when the rows are read for Spark."""
    if not is_spark(frame):
        column = column_of(frame, name)
        if column.null_count:
            raise BadData(message, column=name)
        return column
    from pyspark.sql import functions as F

    value = spark_column(frame.schema, name)
    return F.when(value.isNull(), F.raise_error(F.lit(message))).otherwise(value)


def _drawn(frame: Any, fraction: float, settings: Settings) -> Any:
    """Return a boolean column that is True for each row with a chance of `fraction`.

    A row is drawn by its place: its source partition and position. So the draws depend on nothing that is trained on,
    and equal rows are drawn one by one. By the values of a column instead where rows with equal ones go together, and
    by `row_key`, which also names a row when Spark delivers it in another place.
    """
    group = settings.validation_group or settings.together
    if group is not None and (wrong := unfit_together(group, columns_of(schema_of(frame)))):
        raise BadData(f"{'group_col' if settings.validation_group is None else 'validation_group'} names {wrong}")
    keys = [] if settings.row_key is None else Data(frame, row_key=settings.row_key).keys
    if missing := [key for key in keys if key not in columns_of(schema_of(frame))]:
        raise BadData(f"row_key names {missing[0]!r}, which is not there.{suggest(missing[0], schema_of(frame).names)}")
    null = f"column {group!r} holds a null, and rows are drawn by its values. Drop such rows, or give them a value."
    columns = [column_of(frame, key) if not is_spark(frame) else spark_column(frame.schema, key) for key in keys]
    if settings.validation_group is not None:
        columns = [_whole(frame, settings.validation_group, null)]
    elif group is not None:  # It is read, and a null in it is an error then.
        columns = [spark_column(frame.schema, group) if is_spark(frame) else column_of(frame, group)]
    if is_spark(frame):
        return drawn(fraction, settings.seed, columns)
    numbers = _digests(columns) if columns else np.arange(frame.num_rows, dtype=np.uint64)
    start = mixed(np.array([settings.seed % (1 << 63)], np.uint64))
    return pa.array(mixed(mixed(numbers + np.uint64(1)) + start) % np.uint64(_PARTS) < int(fraction * _PARTS))


def drawn(fraction: float, seed: int, columns: Sequence[Any] = ()) -> Any:
    """Return a pyspark Column that is True for a row with a chance of `fraction`: by its place, or these columns."""
    from pyspark.sql import functions as F

    number = F.xxhash64(F.lit(seed % (1 << 63)), *(columns or [F.monotonically_increasing_id()]))
    return F.pmod(number, F.lit(_PARTS)) < int(fraction * _PARTS)


def _digests(columns: Sequence[pa.Array]) -> Any:
    """Return a 64-bit number for each row `[rows]`, equal for rows of equal values."""
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    digests = [hashlib.blake2b(repr(row).encode(), digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(digests), np.uint64).copy()
