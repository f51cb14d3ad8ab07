"""How far every rank's rows have come: what lets a rank take a step while rows still arrive (any process)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

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
    """The coordinator's side: collects reports, and says when the mark has moved. Thread-safe."""

    def __init__(self, size: int) -> None:
        self.mark = Mark(0, {}, size)
        self._rows = [0] * size
        self._lock = threading.Lock()

    def report(self, index: int, rows: int, ended: bool) -> Mark | None:
        """`index` has `rows` committed rows, and if `ended`, no more will come. The new Mark if it moved."""
        with self._lock:
            self._rows[index] = max(rows, self._rows[index])
            done = {**self.mark.ended, index: rows} if ended else self.mark.ended
            going = [count for i, count in enumerate(self._rows) if i not in done]
            mark = Mark(min(going) if going else max(self._rows), done, self.mark.size)
            moved = mark != self.mark
            self.mark = mark
            return mark if moved else None


@dataclass
class Feed:
    """The rank's side: waits for the mark. `publish` and `fail` may come from any thread; nothing polls."""

    _mark: Mark | None = None
    _error: BaseException | None = None
    _moved: threading.Condition = field(default_factory=threading.Condition)
    fingerprint: Table | None = None
    """Of the rows of all indices; there before the mark is complete, or never."""

    def publish(self, mark: Mark) -> None:
        """Take a newer mark, and wake those who wait for it."""
        with self._moved:
            self._mark = mark
            self._moved.notify_all()

    def fail(self, error: BaseException) -> None:
        """No further mark will come: raise `error` in everyone who waits, or will."""
        with self._moved:
            self._error = error
            self._moved.notify_all()

    def wait(self, rows: int) -> Mark:
        """The mark, as soon as it has reached `rows` or every index has ended."""
        with self._moved:
            while self._mark is None or not (self._mark.rows >= rows or self._mark.complete):
                if self._error is not None:
                    raise self._error
                self._moved.wait()
            return self._mark

    def counts(self) -> list[int]:
        """The rows of every index, in order, as soon as all have ended."""
        with self._moved:
            while self._mark is None or not self._mark.complete:
                if self._error is not None:
                    raise self._error
                self._moved.wait()
            return [self._mark.ended[index] for index in range(self._mark.size)]
