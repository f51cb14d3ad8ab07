"""The watermark: the rows that every rank has, so that steps can be taken while rows still arrive (any process)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace

from tritium.data.fingerprint import Table


@dataclass(frozen=True)
class Watermark:
    """Every shard index below `size` has at least `rows` rows, or has ended with the count in `ended`."""

    rows: int
    ended: dict[int, int]
    size: int

    @property
    def complete(self) -> bool:
        """Whether every shard has ended, so that every count is known."""
        return len(self.ended) == self.size


class WatermarkTracker:
    """The coordinator's watermark of one named DataFrame, computed from the reports of all ranks. Thread-safe.

    A report costs the same however many ranks there are, unless it moves the watermark. `change()` returns each end
    once, so that the total sent to one rank grows with the number of ranks, not with its square.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._rows = [0] * size
        self._least = 0
        self._ended: dict[int, int] = {}
        self._unsent: dict[int, int] = {}
        self._sent = 0
        self._lock = threading.Lock()

    @property
    def watermark(self) -> Watermark:
        """The watermark with the counts of all shards that have ended."""
        with self._lock:
            return Watermark(self._least, dict(self._ended), self.size)

    @property
    def complete(self) -> bool:
        """Whether every shard has ended."""
        with self._lock:
            return len(self._ended) == self.size

    def report(self, index: int, rows: int, ended: bool) -> bool:
        """Record that `index` has `rows` committed rows, all of its rows if `ended`.

        Returns whether the watermark has changed.
        """
        with self._lock:
            before = self._least
            at_least = index not in self._ended and self._rows[index] <= self._least
            self._rows[index] = max(rows, self._rows[index])
            if ended:
                self._ended[index] = self._unsent[index] = rows
            if at_least or ended:  # No other rank can have held the watermark back.
                going = [count for i, count in enumerate(self._rows) if i not in self._ended]
                self._least = min(going) if going else max(self._rows)
            return ended or self._least != before

    def change(self) -> Watermark | None:
        """Return the watermark with only the ends that are new since the last call; None if nothing has changed."""
        with self._lock:
            if not self._unsent and self._least == self._sent:
                return None
            self._sent, unsent, self._unsent = self._least, self._unsent, {}
            return Watermark(self._least, unsent, self.size)


@dataclass
class Feed:
    """The watermark of one named DataFrame in a rank. `publish` may be called from any thread."""

    while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context for the time of a wait, so that others see that this process waits for rows."""
    _watermark: Watermark | None = None
    _moved: threading.Condition = field(default_factory=threading.Condition)
    fingerprint: Table | None = None
    """The fingerprint of the rows of all shards; set before the watermark is complete, or never."""

    def publish(self, watermark: Watermark) -> None:
        """Set a newer watermark, or add the change of `WatermarkTracker.change`, and wake waiting threads."""
        with self._moved:
            before = {} if self._watermark is None else self._watermark.ended
            self._watermark = replace(watermark, ended={**before, **watermark.ended})
            self._moved.notify_all()

    def wait(self, rows: int) -> Watermark:
        """Return the watermark as soon as it has reached `rows` or every shard has ended."""
        return self._await(lambda watermark: watermark.rows >= rows or watermark.complete)

    def counts(self) -> list[int]:
        """Return the rows of every shard, in the order of indices, as soon as all have ended."""
        watermark = self._await(lambda watermark: watermark.complete)
        return [watermark.ended[index] for index in range(watermark.size)]

    def _await(self, reached: Callable[[Watermark], bool]) -> Watermark:
        with ExitStack() as stack, self._moved:
            entered = False
            while self._watermark is None or not reached(self._watermark):
                if not entered:
                    entered = True
                    stack.enter_context(self.while_waiting())
                self._moved.wait()
            return self._watermark
