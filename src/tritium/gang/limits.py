"""What a rank may send at once, checked where it is given (rank, supervisor)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritium.errors import BadSetting, TooLarge
from tritium.wire import MAX_BLOB, clip

TEXT_BYTES = 1 << 16  # of a text that a rank tells the driver
LINE_BYTES = 1 << 12  # of a line of output that travels with a failure


def check_value(operation: str, rank: int, value: bytes) -> None:
    """Raise TooLarge for a value that is larger than all ranks' together may be."""
    if len(value) > MAX_BLOB:
        raise TooLarge(
            f"world.{operation}(): the value of rank {rank} is {len(value):,} bytes pickled; one call takes "
            f"{MAX_BLOB:,} of all ranks together. Gather less at once, use a collective of the framework for arrays, "
            "or write files with world.store().",
            rank=rank,
            size=len(value),
            limit=MAX_BLOB,
        )


def too_much_to_log(fields: Mapping[str, Any], error: TooLarge) -> BadSetting:
    """The error that `world.log` raises for what does not fit into one message."""
    return BadSetting(
        f"world.log(): {len(fields.get('values', ())):,} values with their names are {error.size:,} bytes; one call "
        f"takes {error.limit:,}. Log fewer at once, or write a file with world.store().",
        size=error.size,
        limit=error.limit,
    )


def short(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message, each text cut to its beginning and end where it is too long."""
    return {name: clip(value, TEXT_BYTES) if isinstance(value, str) else value for name, value in fields.items()}


def as_shown(line: bytes) -> str:
    """A line of output as a terminal shows it in the end: of a progress bar, which begins its line anew, the last."""
    text = line.decode("utf-8", "replace").rstrip("\r")
    return clip(text.rpartition("\r")[2], LINE_BYTES)
