"""The entry of an epoch in the history of a training, whatever the framework (rank)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = ("epoch", "loss", "seconds", "rows", "rows_per_second", "rows_padded", "learning_rate")
"""Names in an entry beside metrics and the `validation_` values; no metric may have one of them."""


def epoch_entry(epoch: int, means: Mapping[str, Any], *, seconds: float, rows: int, padded: int) -> dict[str, Any]:
    """Return the entry of the `epoch`-th epoch, from 1.

    means : loss and metrics, means over the rows of all ranks.
    seconds : how long the training steps took.
    rows, padded : of all ranks; those that count, and those that only pad the batches to equal steps.
    """
    return {
        "epoch": epoch,
        **means,
        "seconds": seconds,
        "rows": rows,
        "rows_per_second": rows / seconds,
        "rows_padded": padded,
    }
