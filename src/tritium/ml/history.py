"""The entry of an epoch in the history of a training, whatever the framework (rank)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from tritium.errors import BadSetting

NAMES = (
    "epoch",
    "loss",
    "seconds",
    "rows",
    "rows_per_second",
    "rows_padded",
    "rows_skipped",
    "learning_rate",
    "steps_skipped",
)
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


def make_json(entry: dict[str, Any]) -> None:
    """Turn what callbacks have put into an entry into JSON values: NumPy's numbers, arrays and tensors into numbers.

    Raises BadSetting for a value that a saved model's history can't hold.
    """
    for name, value in entry.items():
        turned: list[Any] = []
        try:
            text = json.dumps({name: value}, default=functools.partial(_numbers, turned))
        except (TypeError, ValueError) as error:
            raise BadSetting(
                f"A callback has put {name!r} into the history of epoch {entry.get('epoch')}, a "
                f"{type(value).__name__} that a saved model's history can't hold ({error}). Put in numbers, texts, and "
                "lists or dicts of these; other values can stay in the callback.",
                key=name,
                epoch=entry.get("epoch"),
            ) from error
        if turned:
            entry[name] = json.loads(text)[name]


def _numbers(turned: list[Any], value: Any) -> Any:
    """Return a number or an array of NumPy or torch as Python's own, kept in `turned`. Raises TypeError for others."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} is no JSON value")
    turned.append(value)
    return value.tolist()
