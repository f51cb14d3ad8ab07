"""The histogram of an array that a rank gives to `world.log` (rank)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritium.errors import BadSetting

_BINS = 30
_MOST = float(np.finfo(np.float32).max)


def of(name: str, values: Any) -> dict[str, Any] | None:
    """Return the histogram of an array or tensor as in the event Logged; None where no value is a finite float32.

    Raises BadSetting for values that are no numbers.
    """
    try:
        if hasattr(values, "detach"):  # A tensor of torch, whose bfloat16 NumPy does not know.
            values = values.detach().cpu().double()
        array = np.asarray(values, np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise BadSetting(
            f"world.log takes arrays of numbers in histograms=: {name!r} is of {type(values).__name__} ({error})."
        ) from error
    array = array[np.abs(array) <= _MOST]
    if not array.size:
        return None
    low, high = float(array.min()), float(array.max())
    # By their edges, as `np.histogram(array, 30)` refuses values that are too close together.
    counts, _ = np.histogram(array, np.linspace(low, high, _BINS + 1))
    totals = {"sum": float(array.sum()), "sum_squares": float(array @ array)}
    return {"low": low, "high": high, "counts": counts.tolist(), **totals}
