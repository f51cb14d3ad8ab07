"""The number of rows that a model is called with at once, found while it is called (any process)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tritium.errors import BadSetting

BatchSize = int | Literal["auto"]
Precision = Literal["fp32", "bf16", "fp16"]
_FIRST, _LAST = 64, 65_536
_GAIN = 1.05
"""By how much rows must be faster for the size to grow further. Two calls of one size differ by less on an idle CPU."""
_CALLS = 3
"""The calls of a size, of which the first is not timed: it allocates memory, and may compile."""


@dataclass(frozen=True)
class Computing:
    """How a model's numbers are computed, which not every engine lets its user choose.

    precision : "fp32": in the dtypes of the model; "bf16" or "fp16": matrix products in bfloat16 or float16, while the
                weights stay as they are.
    compile   : whether the module is compiled before its first call.
    """

    precision: Precision = "fp32"
    compile: bool = False

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            known = ", ".join(map(repr, get_args(Precision)))
            raise BadSetting(f"precision={self.precision!r} is unknown; choose one of {known}.", setting="precision")
        if not isinstance(self.compile, bool):
            raise BadSetting(f"compile={self.compile!r} must be True or False.", setting="compile")


class CallState:
    """What the calls of a model in this process have shown: how many rows to call it with, and whether it works.

    batch_size : the rows of a call, or "auto": the size is doubled while rows per second grow by it.

    Both sizes are halved when memory does not suffice, and do not grow again.
    """

    def __init__(self, batch_size: BatchSize) -> None:
        self.rows = _FIRST if batch_size == "auto" else batch_size
        self.has_worked = False
        """Whether the model has returned predictions for a row. Until then an error of all rows is the model's."""
        self._grows = batch_size == "auto"
        self._best = (0.0, self.rows)
        self._rate, self._count = 0.0, 0

    def on_success(self, rows: int, seconds: float) -> None:
        """Note a call of so many rows that has taken so long."""
        self.has_worked = True
        if not self._grows or rows != self.rows:  # The last rows of a batch, which are fewer, tell nothing.
            return
        self._count += 1
        if self._count > 1:
            self._rate = max(self._rate, rows / max(seconds, 1e-9))
        if self._count < _CALLS:
            return
        fastest, best = self._best
        self._grows = self._rate > fastest * _GAIN and rows < _LAST
        if self._rate > fastest * _GAIN:
            self._best = (self._rate, rows)
            best = rows
        self.rows = 2 * rows if self._grows else best
        self._rate, self._count = 0.0, 0

    def on_out_of_memory(self, rows: int) -> None:
        """Note that memory did not suffice for a call of so many rows."""
        self.rows = max(1, min(self.rows, rows // 2))
        self._grows = False


def check_batch_size(batch_size: BatchSize) -> None:
    """Raise BadSetting unless it is a whole number of at least 1, or "auto"."""
    if batch_size == "auto":
        return
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise BadSetting(f"batch_size={batch_size!r}: it must be a whole number of at least 1, or 'auto'.")
