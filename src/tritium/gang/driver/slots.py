"""Reservations of slots, so that concurrent launches of this process do not each get only a part (driver)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

from tritium.errors import StartTimeout


class Reservations:
    """The launches of this process that hold, or wait for, slots of one Spark application."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders: dict[object, tuple[Fraction, int]] = {}
        self._queue: list[object] = []
        self.executors = 0
        """The number of executors when a gang was last started."""

    @contextmanager
    def hold(
        self, share: Fraction, ranks: int, available: int, timeout: float, note: Callable[[str], object]
    ) -> Iterator[None]:
        """Reserve the fraction `share` of all slots for a block; first come, first served.

        Calls `note` when it has to wait. Raises StartTimeout after `timeout` seconds. `ranks` and `available` (slots)
        are for the messages.
        """
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                if not self._fits(ticket, share):
                    note(self._waiting(ranks, available))
                    if not self._changed.wait_for(lambda: self._fits(ticket, share), timeout):
                        raise StartTimeout(self._late(ranks, available, timeout), needed=ranks, available=available)
                self._holders[ticket] = (share, ranks)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                del self._holders[ticket]
                self._changed.notify_all()

    def _fits(self, ticket: object, share: Fraction) -> bool:
        return self._queue[0] is ticket and sum((s for s, _ in self._holders.values()), share) <= 1

    def _waiting(self, needed: int, available: int) -> str:
        held = sum(ranks for _, ranks in self._holders.values())
        return (
            f"waiting for slots: {needed} needed, {available} in all, and other launches of this driver hold "
            f"theirs ({held} rank{'s' * (held != 1)} running, {len(self._queue) - 1} launch(es) waiting before it)"
        )

    def _late(self, needed: int, available: int, timeout: float) -> str:
        return (
            f"{self._waiting(needed, available)}. None came free within start_timeout={timeout:g} s. Wait for the "
            "other launches, ask for fewer ranks, or raise start_timeout."
        )


_applications: dict[str, Reservations] = {}
_applications_lock = threading.Lock()


def reservations(application: str) -> Reservations:
    """Return the reservations of one Spark application, by its id."""
    with _applications_lock:
        return _applications.setdefault(application, Reservations())
