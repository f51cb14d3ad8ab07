"""The limits of a rank's messages (rank, supervisor)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritium.errors import BadSetting, TooLarge
from tritium.events import Logged
from tritium.wire import MAX_BLOB, clip

TEXT_BYTES = 1 << 16
"""The limit of a text that a rank sends to the driver."""
GRACE_SECONDS = 30.0
"""Ranks have as long, as with torchrun, after a signal, or after their gang's time is over."""
LINE_BYTES = 1 << 12
"""The limit of a line of output that is sent with a failure."""


def check_value(operation: str, rank: int, value: bytes) -> None:
    """Raise TooLarge for a value over MAX_BLOB, the limit of all ranks' values together."""
    if len(value) > MAX_BLOB:
        raise TooLarge(
            f"world.{operation}(): the value of rank {rank} is {len(value):,} bytes pickled; one call takes "
            f"{MAX_BLOB:,} of all ranks together. Gather less at once, use a collective of the framework for arrays, "
            "or write files with world.store().",
            rank=rank,
            size=len(value),
            limit=MAX_BLOB,
        )


def too_much_to_log(event: Logged, error: TooLarge) -> BadSetting:
    """Return the error that `world.log` raises for values over the limit of a message."""
    return BadSetting(
        f"world.log(): {len(event.values or ()):,} values with their names are {error.size:,} bytes; one call "
        f"takes {error.limit:,}. Log fewer at once, or write a file with world.store().",
        size=error.size,
        limit=error.limit,
    )


def short(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message, with texts over TEXT_BYTES cut in the middle."""
    return {name: clip(value, TEXT_BYTES) if isinstance(value, str) else value for name, value in fields.items()}


def as_shown(line: bytes) -> str:
    """Decode a line of output as a terminal finally shows it: the text after the last carriage return."""
    text = line.decode("utf-8", "replace").rstrip("\r")
    return clip(text.rpartition("\r")[2], LINE_BYTES)
