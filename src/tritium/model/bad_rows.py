"""Rows without a prediction: what becomes of them, and which errors of a model are a row's (any process)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from tritium.errors import BadSetting, TritiumError

if TYPE_CHECKING:
    import numpy as np

OnError = Literal["fail", "skip", "null", "column"]
_SHOWN_CHARACTERS = 500
_DEVICE_ERRORS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")
_OUT_OF_MEMORY_CLASSES = ("OutOfMemoryError", "ResourceExhaustedError")
_OUT_OF_MEMORY_TEXTS = (
    *("not enough memory", "can't allocate memory", "out of memory", "RESOURCE_EXHAUSTED", "std::bad_alloc"),
    *("Failed to allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"),
)


@dataclass
class BadRows:
    """The rows of a table or batch that have no prediction. `reasons`: position → why, where that was asked for."""

    valid: np.ndarray[Any, Any] | None = None
    """A bool `[rows]`: whether a row has a prediction; None: all have."""
    reasons: dict[int, str] = field(default_factory=dict)

    def among_all(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return predictions `[valid rows, …]` at their places among all rows, NaN (None) for those without one."""
        import numpy as np

        assert self.valid is not None
        kind = values.dtype if values.dtype.kind in "fO" else np.dtype(np.float64)
        placed = np.full((len(self.valid), *values.shape[1:]), None if kind.kind == "O" else np.nan, kind)
        placed[self.valid] = values
        return placed

    def with_failed(self, failed: dict[int, str], rows: int) -> BadRows:
        """Return these and the rows that failed later, whose positions are among the `rows` that were valid."""
        import numpy as np

        if not failed:
            return self
        valid = np.ones(rows, np.bool_) if self.valid is None else self.valid.copy()
        positions = np.flatnonzero(valid)
        more = {int(positions[row]): reason for row, reason in failed.items()}
        valid[list(more)] = False
        return BadRows(valid, {**self.reasons, **more})


def check_on_error(value: str) -> None:
    """Raise BadSetting unless it is "fail", "skip", "null" or "column"."""
    if value not in get_args(OnError):
        raise BadSetting(
            f"on_error={value!r}: a row that the model can't take ends the job ('fail'), is left out ('skip'), or has "
            "null as its prediction ('null'), with the reason in a column of its own ('column').",
            setting="on_error",
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a model raised this because memory could not be allocated, which fewer rows may avoid."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ in _OUT_OF_MEMORY_CLASSES
        or any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
    )


def is_fatal(error: Exception, rows: int) -> bool:
    """Return whether this error of a call with so many rows is no row's: other rows would fail by it, too.

    That are code that can't be imported, a device that has failed, outputs that do not fit the signature, and too
    little memory for one row.
    """
    if is_out_of_memory(error):
        return rows == 1
    return (
        isinstance(error, TritiumError | ImportError)
        or type(error).__name__ == "AcceleratorError"
        or any(text in str(error) for text in _DEVICE_ERRORS)
    )


def reason_of(error: Exception) -> str:
    """Return an error of a model as one text for the row that it was raised for."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
