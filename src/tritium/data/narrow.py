"""Casts of numbers to the dtype of a batch, which refuse those that it can't hold (any process).

Where all values are valid, only the smallest and the largest are examined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tritium.errors import BadRow

Array = np.ndarray[Any, Any]
ErrorAt = Callable[[int, Any, str, str], BadRow]
"""Returns the error for (position, value, problem, advice); `{0!r}` in the advice stands for the column."""

# The advised code means the same in Spark and in pandas, as dropna and fillna take NaN for null in both.
_KEEP = "or make it an ordinary value with nan='keep' (of tr.Data in a launch, of the estimator)"
_NAN = f"Drop such rows (`df.dropna(subset=[{{0!r}}])`), fill them (`df.fillna({{{{{{0!r}}: 0}}}})`), {_KEEP}"
_BETWEEN = "`df[df[{{0!r}}].between(-{limit}, {limit})]`"
_INFINITE = "Drop such rows ({drop}), bring the column into range (scale it, or take its logarithm), " + _KEEP
# The advice for arrays is longer, as dropna does not look into them. For Spark a NaN is larger than every number.
_DROP_ARRAYS = (
    "with Spark `df.where(F.forall({inside}, lambda v: F.abs(v) <= {limit}))`, with pandas "
    "`df[df[{{0!r}}].map(lambda v: np.isfinite(v).all())]`"
)
_BEYOND = (
    "Bring the column into range (scale it, or take its logarithm), or, in a launch, ask for a wider dtype: "
    "tr.Data(dtype='float64')"
)
_ROUNDED = (
    "If rounding is meant, say so in Spark: F.col({0!r}).cast('float'), or .astype('float32') in pandas. Of a time or "
    "a counter, take the difference from a start; an index stays an integer in a batch column of its own. "
    "LightGBM reads features with feature_dtype='float64', and its categories are numbered from 0 (StringIndexer)"
)


def cast(values: Array, dtype: np.dtype[Any], at: ErrorAt) -> Array:
    """Return `values` [k] in `dtype`. Raises BadRow for NaN and for numbers beyond an integer dtype.

    A number beyond a floating dtype becomes infinite here, and is found by `check`.
    """
    if values.dtype == dtype:
        return values
    if dtype.kind in "iu" and len(values) and not np.can_cast(values.dtype, dtype):
        position = first_beyond(values, dtype)
        if position is not None:
            value = values[position].item()
            raise at(position, value, f"{value!r}, beyond the {dtype} that was asked for,", "Ask for a wider dtype")
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)


def first_beyond(values: Array, dtype: np.dtype[Any]) -> int | None:
    """Return the position of the first value `[k]` that is NaN or beyond an integer dtype; None where it holds all."""
    fits = _within(values, dtype)
    return None if fits.all() else int(np.argmin(fits))


def _within(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return a bool `[k]`: which values an integer dtype holds."""
    limits = np.iinfo(dtype)
    if values.dtype.kind == "f":  # The largest int64 is no float, but the next integer is.
        fits: Array = (values >= float(limits.min)) & (values < float(limits.max) + 1)
    else:
        fits = (values >= limits.min) & (values <= limits.max)
    return fits


def beyond(values: Array, dtype: np.dtype[Any], exact: Sequence[bool] = ()) -> Array:
    """Return a bool `[k]`: which values `cast` and `check` refuse, though they are finite or become integers.

    exact : as `check` takes it.
    """
    if dtype.kind in "iu":
        return np.zeros(len(values), np.bool_) if np.can_cast(values.dtype, dtype) else ~_within(values, dtype)
    if dtype.kind != "f":
        return np.zeros(len(values), np.bool_)
    with np.errstate(over="ignore", invalid="ignore"):
        narrowed = values.astype(dtype, copy=False)
    refused: Array = ~np.isfinite(narrowed) & np.isfinite(values)
    if any(exact):
        must = np.resize(np.asarray(exact, np.bool_), len(values))
        refused |= must & ~(np.abs(narrowed) < largest_exact(dtype))
    return refused


def check(
    values: Array, raw: Array, at: ErrorAt, *, keep: bool, exact: Sequence[bool] = (), inside: str | None = None
) -> None:
    """Raise BadRow for the first value that its floating dtype can't hold.

    values : `[k]`, as they go into a batch.
    raw    : the values before the cast (the same array where there was none).
    keep   : whether NaN and infinity are ordinary values; a number that became infinite by the cast is none.
    exact  : for each of the columns whose values lie side by side, whether it holds integers that must stay exact.
    inside : for values in arrays: the code that makes one Spark array of them, for the advice; None: no arrays.
    """
    if values.dtype.kind != "f" or not len(values) or (keep and raw is values and not any(exact)):
        return
    if not any(exact) and finite(values):
        return
    low, high = values.min(), values.max()  # Both are NaN if any value is.
    if not (math.isfinite(low) and math.isfinite(high)):
        _check_finite(values, raw, at, keep, inside)
    limit = largest_exact(values.dtype)
    if any(exact) and not (-limit < low and high < limit):
        _check_exact(values, raw, at, limit, exact)


def finite(values: Array) -> bool:
    """Return whether no value is NaN or infinite."""
    if values.dtype.kind != "f":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        # One pass as fast as memory, unlike `sum` of rows with a stride. Large values may overflow it.
        total = np.einsum(values, list(range(values.ndim)), [])
    return bool(np.isfinite(total) or np.isfinite(values).all())


def _check_finite(values: Array, raw: Array, at: ErrorAt, keep: bool, inside: str | None) -> None:
    bad = ~np.isfinite(values)
    if keep:
        bad &= np.isfinite(raw)
        if not bad.any():
            return
    position = int(np.argmax(bad))
    value, dtype = raw[position].item(), values.dtype
    limit = f"{float(np.finfo(dtype).max):.6g}" if dtype.itemsize < 8 else "1.79e308"
    if isinstance(value, int) or math.isfinite(value):
        raise at(position, value, f"{value!r}, beyond {dtype} (up to {limit}),", _BEYOND)
    drop = (_BETWEEN if inside is None else _DROP_ARRAYS).format(limit=limit, inside=inside)
    if math.isnan(value):
        raise at(position, value, "NaN", _NAN if inside is None else f"Drop such rows ({drop}), {_KEEP}")
    what = "infinite"
    if raw is values and dtype.itemsize < 8:  # It arrived as infinite, perhaps from Spark's own cast.
        what = f"infinite, or beyond {dtype} (up to {limit}),"
    raise at(position, value, what, _INFINITE.format(drop=drop))


def _check_exact(values: Array, raw: Array, at: ErrorAt, limit: int, exact: Sequence[bool]) -> None:
    count = len(exact)
    first = len(values)
    for column in np.flatnonzero(exact):
        of_column = values[column::count]
        if len(of_column) and not (-limit < of_column.min() and of_column.max() < limit):
            where = int(np.argmax(~(np.abs(of_column) < limit)))
            first = min(first, where * count + int(column))
    if first == len(values):
        return
    value = raw[first].item()
    shown = f"{value:,}" if isinstance(value, int) else f"about {value:,.0f}"
    what = f"{shown}, an integer beyond {limit - 1:,}, up to which {values.dtype} is exact,"
    raise at(first, value, what, _ROUNDED)


def largest_exact(dtype: np.dtype[Any]) -> int:
    """Return the integer up to which a floating dtype holds every integer: 2**24 for float32."""
    return int(2 ** (np.finfo(dtype).nmant + 1))


def holds(dtype: np.dtype[Any], integers: np.dtype[Any]) -> bool:
    """Return whether a floating dtype holds every value of an integer dtype: float32 those of int16, not of int32."""
    return integers.kind not in "iu" or int(np.iinfo(integers).max) <= largest_exact(dtype)


def fits(fill: float, dtype: str) -> bool:
    """Return whether a bool or integer dtype holds the fill value."""
    if dtype == "bool":
        return fill in (0, 1)
    limits = np.iinfo(dtype)
    return limits.min <= fill <= limits.max and int(fill) == fill
