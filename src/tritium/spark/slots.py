"""Reservations of slots, so that concurrent launches of this process do not each get only a part (driver).

A run holds its slots from its first attempt to its end, so that no other launch takes them before a retry. A run that
waits holds none, so that no two runs wait for each other.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Protocol

from tritium.errors import StartTimeout

RECOUNT_SECONDS = 2.0  # A run that waits counts the slots of the cluster so often, as executors come and go.

Kind = tuple[int | None, float, str]
"""CPU cores and accelerators of a rank, and the name of these in Spark."""


class _Sized(Protocol):
    @property
    def cpus(self) -> int | None: ...
    @property
    def gpus(self) -> float: ...
    @property
    def accelerator(self) -> str: ...


def kind_of(gang: _Sized) -> Kind:
    """Return the kind of this gang's ranks."""
    return gang.cpus, gang.gpus, gang.accelerator


class Reservations:
    """The runs of this process that hold, or wait for, slots of one Spark application. `changed` guards all of it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.held: dict[RunSlots, int] = {}
        """Run → ranks that it holds slots for."""
        self.queue: list[RunSlots] = []
        """Runs that wait for slots, in the order in which they first did. None of them holds any."""
        self.available: dict[Kind, int] = {}
        """Kind of rank → how many of them the whole cluster can run, when last counted."""
        self.arrivals = itertools.count()
        self.executors = 0
        """The number of executors when a gang was last started."""

    def share(self, kind: Kind, ranks: int) -> Fraction:
        """Return the fraction of all slots that `ranks` ranks take, so that ranks of different kinds add up.

        It is never more than the whole, although executors may have been lost.
        """
        return Fraction(ranks, max(ranks, self.available[kind]))

    def free(self, run: RunSlots) -> Fraction:
        """Return the fraction that other runs than `run` leave; below 0 where executors were lost."""
        others = (self.share(other.kind, ranks) for other, ranks in self.held.items() if other is not run)
        return 1 - sum(others, Fraction(0))


class RunSlots:
    """The slots of one run; all its attempts share them.

    It holds none before `take`, nor on Connect and under dynamic allocation, where there is nothing to reserve. `count`
    always returns the slots of the whole cluster for ranks of this run's kind.
    """

    def __init__(self) -> None:
        self.kind: Kind = (None, 0, "gpu")
        self._of: Reservations | None = None
        self._arrival = 0
        self._stopped = False

    def take(
        self,
        reservations: Reservations,
        kind: Kind,
        ranks: int,
        count: Callable[[], int],
        timeout: float,
        note: Callable[[str], object],
    ) -> None:
        """Hold the slots of `ranks` ranks until `release`, unless some are held already; first come, first served.

        Calls `note` when it has to wait. Raises StartTimeout after `timeout` seconds.
        """
        if self._of is None:
            self._of, self.kind, self._arrival = reservations, kind, next(reservations.arrivals)
        with reservations.changed:
            if self in reservations.held:
                return
        deadline, told = time.monotonic() + timeout, False
        with self._queued(reservations):
            while True:
                available = count()  # It asks Spark, so it is called without the lock.
                with reservations.changed:
                    reservations.available[kind] = available
                    if self._stopped:
                        return
                    if self._is_next(reservations, ranks):
                        reservations.held[self] = ranks
                        return
                    if not told:
                        note(_waiting(reservations, ranks, available))
                        told = True
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise StartTimeout(
                            f"{_waiting(reservations, ranks, available)}. None came free within "
                            f"start_timeout={timeout:g} s. Wait for the other launches, ask for fewer ranks, or raise "
                            "start_timeout.",
                            needed=ranks,
                            available=available,
                        )
                    reservations.changed.wait_for(
                        lambda: self._stopped or self._is_next(reservations, ranks), min(left, RECOUNT_SECONDS)
                    )

    def stop_waiting(self) -> None:
        """Have `take`, in another thread, return without any slots."""
        self._stopped = True
        if self._of is not None:
            with self._of.changed:
                self._of.changed.notify_all()

    def resize(self, least: int, most: int, count: Callable[[], int]) -> int:
        """Hold the slots of as many ranks as there is room for, up to `most`, and return how many. Does not wait.

        Where there is no room even for `least` (executors were lost, and other runs hold the rest), gives the slots up
        and returns `most`: to wait for them without holding any is left to `take`.
        """
        if self._of is None:
            return most
        available = count()
        with self._of.changed:
            if self not in self._of.held:
                return most
            room = min(most, self._room(self._of, available))
            if room < least:
                del self._of.held[self]
            else:
                self._of.held[self] = room
            self._of.changed.notify_all()
            return room if room >= least else most

    def room(self, count: Callable[[], int]) -> int:
        """Return how many ranks could run in the slots that this run holds and those that are free."""
        available = count()
        if self._of is None:
            return available
        with self._of.changed:
            return self._room(self._of, available)

    def release(self) -> None:
        """Give up all slots. May be called again, and where none are held."""
        if self._of is not None:
            with self._of.changed:
                self._of.held.pop(self, None)
                self._of.changed.notify_all()

    def _room(self, reservations: Reservations, available: int) -> int:
        reservations.available[self.kind] = available
        room = max(0, int(reservations.free(self) * available))
        # A run that grew before those that wait would never let them start.
        return min(room, reservations.held.get(self, 0)) if reservations.queue else room

    def _is_next(self, reservations: Reservations, ranks: int) -> bool:
        return reservations.queue[0] is self and reservations.share(self.kind, ranks) <= reservations.free(self)

    @contextmanager
    def _queued(self, reservations: Reservations) -> Iterator[None]:
        try:
            with reservations.changed:
                reservations.queue.append(self)
                reservations.queue.sort(key=lambda run: run._arrival)  # A run that gave its slots up is first.
            yield
        finally:
            with reservations.changed:
                if self in reservations.queue:  # Ctrl-C may have come before.
                    reservations.queue.remove(self)
                reservations.changed.notify_all()


def _waiting(reservations: Reservations, needed: int, available: int) -> str:
    held, others = sum(reservations.held.values()), len(reservations.queue) - 1
    return (
        f"waiting for slots: {needed} needed, {available} in all, and other launches of this driver hold "
        f"theirs ({held} rank{'s' * (held != 1)} running, {others} launch(es) waiting before it)"
    )


_applications: dict[str, Reservations] = {}
_applications_lock = threading.Lock()


def reservations(application: str) -> Reservations:
    """Return the reservations of one Spark application, by its id."""
    with _applications_lock:
        return _applications.setdefault(application, Reservations())
