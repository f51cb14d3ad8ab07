"""Rows that go to one rank together, by equal values of a column (any process)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from tritium.data.types import SourceType
from tritium.hints import suggest


def problems(
    name: str | None, columns: Mapping[str, SourceType], read: Collection[str], filled: Collection[str]
) -> list[str]:
    """Return the errors of `together=name` for a frame of these columns.

    read   : the columns that are read.
    filled : the names for which `nulls` has a value.
    """
    problem = None if name is None else unfit(name, columns)
    if problem is None and name is not None and name not in read:  # A null in it would not be seen.
        problem = f"{name!r}, which is not read. Add it to `columns=`."
    if name in filled:
        problem = f"{name!r}, whose nulls are filled: they could not go with the rows of that value. "
        problem += f"Fill them before: df.fillna({{{name!r}: 0}})."
    return [f"together names {problem}"] if problem else []


def unfit(name: str, columns: Mapping[str, SourceType]) -> str | None:
    """Return the reason why equal values of this column can't keep rows together, after "… names", or None."""
    if name not in columns:
        return f"{name!r}, which is not there.{suggest(name, list(columns))}"
    kind = columns[name]
    if kind.item is not None or kind.name in ("struct", "other") or kind.dtype.startswith("float"):
        return f"{name!r} of type {kind.text}, and takes integers, strings, dates and timestamps. Cast the column."
    return None


def ranks_of(column: pa.Array, ranks: int) -> np.ndarray[Any, Any]:
    """Return the rank of each row `[rows]` of a table: distinct values are dealt in the order of their first rows."""
    codes = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    ranks_of_rows: np.ndarray[Any, Any] = codes.indices.fill_null(0).to_numpy(zero_copy_only=False) % ranks
    return ranks_of_rows
