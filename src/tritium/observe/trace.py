"""Where the time of a rank's steps goes (rank).

The time from the first batch asked for to the end of the last epoch is cut into sections; of nested ones the innermost
counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

Section = Literal[
    "wait for data", "copy to device", "forward", "backward", "communicate", "optimizer", "rows to arrive"
]

SECTIONS = ("wait for data", "copy to device", "forward", "backward", "communicate", "optimizer", "other")
T = TypeVar("T")


class Trace:
    """One rank's. Only the thread that takes the batches is measured.

    settle : waits for the device, so that what runs there is counted where it was begun.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}
        self._inside: list[Section] = []
        self._thread: int | None = None
        self._begun = self._mark = self._ended = 0.0
        self._steps = 0
        self._kept: dict[str, float] = {}
        self.settle: Callable[[], object] = _nothing
        self.first_batch: Callable[[], object] = _nothing
        """Called before the first batch: the time to hook into a framework, which has been imported by then."""
        self.in_backward: Callable[[], float] = float
        """Seconds of "backward" in which the rank only waited for the exchange of gradients."""

    def batches(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches, each a step."""
        if self._thread is None:
            self.first_batch()
            self._thread = threading.get_ident()
            self._begun = self._mark = self._clock()
        while True:
            try:
                with self.within("wait for data"):
                    batch = next(batches)
            except StopIteration:
                self._ended, self._kept = self._clock(), dict(self._spent)
                return
            self._steps += 1
            yield batch

    @contextmanager
    def within(self, section: Section) -> Iterator[None]:
        """A block of this section."""
        self.enter(section)
        try:
            yield
        finally:
            self.leave(section)

    def enter(self, section: Section) -> None:
        """From now on, until `leave`."""
        if threading.get_ident() != self._thread:
            return
        if not self._inside or self._inside[-1] != section:
            self._account()
        self._inside.append(section)

    def leave(self, section: Section) -> None:
        """Back to what was before. What was entered within and never left, because it raised, is left too."""
        if threading.get_ident() != self._thread or section not in self._inside:
            return
        if self._inside[-2:] != [section, section]:
            self._account()
        while self._inside.pop() != section:
            pass

    def _account(self) -> None:
        self.settle()
        now = self._clock()
        if self._inside:
            self._spent[self._inside[-1]] = self._spent.get(self._inside[-1], 0.0) + now - self._mark
        self._mark = now

    def report(self) -> dict[str, Any] | None:
        """JSON: `steps`, `seconds` by section in the order of SECTIONS, and of those of "wait for data" the seconds in
        which rows had yet to `arrive`. None when no epoch has been taken to its end.
        """
        if not self._ended:
            return None
        spent = dict(self._kept)
        arrive = spent.pop("rows to arrive", 0.0)
        waited = min(self.in_backward(), spent.get("backward", 0.0))
        spent["wait for data"] = spent.get("wait for data", 0.0) + arrive
        spent["backward"] = spent.get("backward", 0.0) - waited
        spent["communicate"] = spent.get("communicate", 0.0) + waited
        spent["other"] = max(0.0, self._ended - self._begun - sum(spent.values()))
        seconds = {name: round(spent.get(name, 0.0), 4) for name in SECTIONS}
        return {"steps": self._steps, "seconds": seconds, "arrive": round(arrive, 4)}


def _nothing() -> None:
    pass
