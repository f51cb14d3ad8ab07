"""An epoch in the history of a training, whatever the framework (rank)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = ("epoch", "loss", "seconds", "rows", "rows_per_second", "rows_padded", "learning_rate")
"""What an entry holds beside metrics and the `validation_` values, so that no metric can be called so."""


def epoch_entry(epoch: int, means: Mapping[str, Any], *, seconds: float, rows: int, padded: int) -> dict[str, Any]:
    """The entry of the `epoch`-th epoch, from 1.

    means : loss and metrics, means over the rows of all ranks.
    seconds : those in which the rows were taken.
    rows, padded : of all ranks; those that count, and those that were only there to keep the ranks in step.
    """
    return {
        "epoch": epoch,
        **means,
        "seconds": seconds,
        "rows": rows,
        "rows_per_second": rows / seconds,
        "rows_padded": padded,
    }
