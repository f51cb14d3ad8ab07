"""How far every rank's rows have come: what lets a rank take a step while rows still arrive (any process)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace

from tritium.data.fingerprint import Table


@dataclass(frozen=True)
class Mark:
    """Every index below `size` has at least `rows` rows, or has ended with the count in `ended`."""

    rows: int
    ended: dict[int, int]
    size: int

    @property
    def complete(self) -> bool:
        """Every index has ended, so every count is known."""
        return len(self.ended) == self.size


class MarkKeeper:
    """The coordinator's side: collects reports, and tells what of the mark has changed. Thread-safe.

    A report costs the same however many ranks there are, unless it moves the mark; and each end is told once, so that
    all that a rank is sent grows with the number of ranks, not with its square.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._rows = [0] * size
        self._least = 0
        self._ended: dict[int, int] = {}
        self._untold: dict[int, int] = {}
        self._told = 0
        self._lock = threading.Lock()

    @property
    def mark(self) -> Mark:
        """The whole mark."""
        with self._lock:
            return Mark(self._least, dict(self._ended), self.size)

    @property
    def complete(self) -> bool:
        """Every index has ended."""
        with self._lock:
            return len(self._ended) == self.size

    def report(self, index: int, rows: int, ended: bool) -> bool:
        """`index` has `rows` committed rows, and if `ended`, no more will come. Whether the mark has moved."""
        with self._lock:
            before = self._least
            at_least = index not in self._ended and self._rows[index] <= self._least
            self._rows[index] = max(rows, self._rows[index])
            if ended:
                self._ended[index] = self._untold[index] = rows
            if at_least or ended:  # no other rank can have held the mark back
                going = [count for i, count in enumerate(self._rows) if i not in self._ended]
                self._least = min(going) if going else max(self._rows)
            return ended or self._least != before

    def change(self) -> Mark | None:
        """What has changed since this was asked last: with the ends that are new alone. None if nothing has."""
        with self._lock:
            if not self._untold and self._least == self._told:
                return None
            self._told, untold, self._untold = self._least, self._untold, {}
            return Mark(self._least, untold, self.size)


@dataclass
class Feed:
    """The rank's side: waits for the mark. `publish` and `fail` may come from any thread; nothing polls."""

    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered for as long as a wait lasts, so that others can see what this process waits for."""
    _mark: Mark | None = None
    _error: BaseException | None = None
    _moved: threading.Condition = field(default_factory=threading.Condition)
    fingerprint: Table | None = None
    """Of the rows of all indices; there before the mark is complete, or never."""

    def publish(self, mark: Mark) -> None:
        """Take a newer mark, or what has changed of it, and wake those who wait for it."""
        with self._moved:
            before = {} if self._mark is None else self._mark.ended
            self._mark = replace(mark, ended={**before, **mark.ended})
            self._moved.notify_all()

    def fail(self, error: BaseException) -> None:
        """No further mark will come: raise `error` in everyone who waits, or will."""
        with self._moved:
            self._error = error
            self._moved.notify_all()

    def wait(self, rows: int) -> Mark:
        """The mark, as soon as it has reached `rows` or every index has ended."""
        return self._await(lambda mark: mark.rows >= rows or mark.complete)

    def counts(self) -> list[int]:
        """The rows of every index, in order, as soon as all have ended."""
        mark = self._await(lambda mark: mark.complete)
        return [mark.ended[index] for index in range(mark.size)]

    def _await(self, enough: Callable[[Mark], bool]) -> Mark:
        with ExitStack() as stack, self._moved:
            entered = False
            while self._mark is None or not enough(self._mark):
                if self._error is not None:
                    raise self._error
                if not entered:
                    entered = True
                    stack.enter_context(self.waiting())
                self._moved.wait()
            return self._mark
