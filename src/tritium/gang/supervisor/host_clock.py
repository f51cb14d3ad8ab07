"""How this host's clock differs from the coordinator's, by the time that its answers take (supervisor)."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from tritium.errors import WireError
from tritium.gang.control.client import Client

_DRIFT = 1e-4
"""Seconds by which a clock may go wrong in a second; most stay below a tenth of it."""


class HostClock:
    """The difference between two clocks, by the fastest of the coordinator's answers. One thread calls `on_answer`."""

    def __init__(self) -> None:
        self._known: tuple[float, float, float] | None = None
        """The offset, its largest error, and the time of day when it was measured."""

    def ask(self, coordinator: Client, times: int) -> None:
        """Send the coordinator so many questions."""
        with contextlib.suppress(WireError):  # The relay notices that the coordinator is gone.
            for _ in range(times):
                coordinator.send("clock", sent=time.time())

    def on_answer(self, sent: float, at: float, now: float) -> None:
        """Take an answer.

        sent, now : this host's time of day when the question was sent and the answer came.
        at        : the coordinator's when it answered, which may be any time between the two.
        """
        error = (now - sent) / 2
        if self._known is None or error <= self._known[1] + _DRIFT * (now - self._known[2]):
            self._known = at - (sent + now) / 2, error, now

    def fields(self) -> dict[str, Any]:
        """Return `offset`, the seconds to add to this host's time of day, and its `error`; None without an answer."""
        if self._known is None:
            return {"offset": 0.0, "error": None}
        offset, error, since = self._known
        return {"offset": offset, "error": error + _DRIFT * max(0.0, time.time() - since)}
