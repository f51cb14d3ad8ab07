"""What a streaming query has scored: its last micro-batches, and its figures over time (driver)."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from tritium.events import MicroBatchScored
from tritium.ui.series import Series

WINDOW = 200
"""The micro-batches over which percentiles are taken."""


class ScoredBatches:
    """The micro-batches of a streaming query. Takes bounded memory, however long it runs."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        """Title of a chart, and after ": " the curve's name → the curve over time."""
        self._window: deque[MicroBatchScored] = deque(maxlen=WINDOW)

    def add(self, event: MicroBatchScored, now: float) -> None:
        """Take a micro-batch that ended at the time `now`, in seconds."""
        self._window.append(event)
        figures = {
            "rows/s": _rate(event.rows, event.seconds),
            "micro-batch seconds": event.seconds,
            "model ms: p50": event.model_ms_p50,
            "model ms: p99": event.model_ms_p99,
            "bad rows": event.bad_rows,
        }
        for name, value in figures.items():
            if value is not None:
                self.series.setdefault(name, Series()).add(now, value)

    def text(self) -> str:
        """Return the last micro-batch in words; "" before the first."""
        if not self._window:
            return ""
        last = self._window[-1]
        version = f"model version {last.model_version}, " if last.model_version is not None else ""
        took = f" in {last.seconds:.2f} s" if last.seconds is not None else ""
        return f"{version}micro-batch {last.batch}: {last.rows:,} rows{took}"

    def to_json(self) -> list[dict[str, Any]]:
        """Return the figures of the last micro-batch, and of the window; [] before the first."""
        windows = [] if not self._window else sorted({1, len(self._window)})
        return [_figures([*self._window][-count:]) for count in windows]


def _figures(batches: list[MicroBatchScored]) -> dict[str, Any]:
    rows = sum(batch.rows for batch in batches)
    seconds = sorted(batch.seconds for batch in batches if batch.seconds is not None)
    figures: dict[str, Any] = {
        "last micro-batches": len(batches),
        "rows": rows,
        "rows/s": _rate(rows, sum(seconds)),
        "p50 s": _percentile(seconds, 0.5),
        "p99 s": _percentile(seconds, 0.99),
        "bad rows": sum(batch.bad_rows or 0 for batch in batches),
        "model version": batches[-1].model_version,
    }
    if len(batches) == 1:  # Percentiles over rows of several micro-batches can't be had of those of each.
        figures |= {"model ms p50": batches[0].model_ms_p50, "model ms p99": batches[0].model_ms_p99}
    return {name: value for name, value in figures.items() if value is not None}


def _rate(rows: int, seconds: float | None) -> float | None:
    return round(rows / seconds, 1) if seconds else None


def _percentile(ascending: list[float], share: float) -> float | None:
    return ascending[math.ceil(share * len(ascending)) - 1] if ascending else None
