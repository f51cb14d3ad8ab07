"""What failed, where, and the next move, as whoever serves the page tells it (driver)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Told:
    """A failure, as a person reads it.

    what   : one line: rank, host, what.
    next   : the next move; "" where the whole text has it.
    whole  : everything that the error's message says.
    """

    what: str
    next: str
    whole: str


Teller = Callable[[Mapping[str, Any], str], Told]
"""Returns the failure with the fields of GangFailed, or of a report, in this run directory."""
