"""How long a rank may make no progress, and what is done then (any process)."""

from __future__ import annotations

from dataclasses import dataclass

from tritium.gang.settings import Gang


@dataclass(frozen=True)
class StallLimit:
    """`seconds` without progress after which a rank is considered hung; `end`: the gang is ended, not only reported."""

    seconds: float
    end: bool = True

    @classmethod
    def of(cls, gang: Gang) -> StallLimit:
        """As `stall_timeout` and `on_stall` say."""
        return cls(gang.stall_timeout, gang.on_stall == "end")

    @property
    def look_seconds(self) -> float:
        """How often to look, and to send heartbeats: four times within the limit; once a second is enough."""
        return max(0.05, min(1.0, self.seconds / 4))
