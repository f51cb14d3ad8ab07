"""The limit of time without progress, and the gang's end after it (any process)."""

from __future__ import annotations

from dataclasses import dataclass

from tritium.gang.settings import Gang


@dataclass(frozen=True)
class StallLimit:
    """The limit of time without progress.

    seconds : a rank without progress for so long is considered hung.
    end     : whether the gang is ended then.
    """

    seconds: float
    end: bool = True

    @classmethod
    def of(cls, gang: Gang) -> StallLimit:
        """Return the limit of the settings `stall_timeout` and `on_stall`."""
        return cls(gang.stall_timeout, gang.on_stall == "end")

    @property
    def look_seconds(self) -> float:
        """Seconds between checks, and between heartbeats: a quarter of the limit, but 0.05 to 1."""
        return max(0.05, min(1.0, self.seconds / 4))
