"""Numbers over steps and over time, thinned so that a page can draw them (driver)."""

from __future__ import annotations

from collections import deque
from typing import Any

from tritium.events import Logged
from tritium.observe.position import RATE_SECONDS

POINTS = 2000
"""The most points of one series."""


class Series:
    """Points with ascending x. When there are more than POINTS, every other one is left out."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[float | None] = []

    def add(self, x: float, y: float | None) -> None:
        """Add a point. Points from x on are replaced: a training that goes on from a checkpoint repeats them."""
        while self.x and self.x[-1] >= x:
            self.x.pop()
            self.y.pop()
        if len(self.x) >= POINTS:
            self.x, self.y = self.x[::2], self.y[::2]
        self.x.append(x)
        self.y.append(y)

    def to_json(self) -> dict[str, Any]:
        """Return the points as two lists; a number that is not finite is None."""
        return {"x": self.x, "y": self.y}


class Curves:
    """What the lowest rank that logs has logged: each name over all steps of the run, and at the end of each epoch."""

    def __init__(self) -> None:
        self.steps: dict[str, Series] = {}
        self.epochs: dict[str, Series] = {}
        self._leader: int | None = None
        self._first: dict[int, int] = {}
        """Epoch → the steps before it."""
        self._lengths: dict[int, int] = {}
        """Epoch → its steps so far."""
        self._last = -1

    def log(self, event: Logged) -> None:
        """Record a log of a rank."""
        if self._leader is not None and event.rank > self._leader:
            return
        self._leader = event.rank
        step = self._step(event)
        for name, value in (event.values or {}).items():
            number = None if isinstance(value, str) else float(value)
            self.steps.setdefault(name, Series()).add(step, number)
            if event.epoch is not None:
                self.epochs.setdefault(name, Series()).add(event.epoch, number)

    def _step(self, event: Logged) -> int:
        """Return the number of the step in the whole run, where steps count from 0 in each epoch."""
        if event.step is None:
            self._last += event.epoch is None
            return self._last
        if event.epoch is None:
            self._last = event.step
            return self._last
        if event.epoch not in self._first:
            before = max((epoch for epoch in self._first if epoch < event.epoch), default=None)
            self._first[event.epoch] = 0 if before is None else self._first[before] + self._lengths[before]
        self._lengths[event.epoch] = max(self._lengths.get(event.epoch, 0), event.step + 1)
        self._last = self._first[event.epoch] + event.step
        return self._last


class Rates:
    """Rows a second of each rank over time, means over RATE_SECONDS."""

    def __init__(self) -> None:
        self.series: dict[int, Series] = {}
        self._windows: dict[int, deque[tuple[float, int]]] = {}

    def log(self, event: Logged, now: float) -> None:
        """Record a log of a rank at the time `now`, in seconds."""
        if event.rows is None:
            return
        window = self._windows.setdefault(event.rank, deque())
        window.append((now, event.rows))
        while window[0][0] < now - RATE_SECONDS and len(window) > 2:
            window.popleft()
        seconds, rows = now - window[0][0], event.rows - window[0][1]
        if seconds > 0:
            self.series.setdefault(event.rank, Series()).add(now, round(rows / seconds, 1))

    def forget_attempt(self) -> None:
        """Begin again: the next attempt counts its rows from 0."""
        self._windows.clear()
