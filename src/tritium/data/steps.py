"""The steps of an epoch: the rows that every rank has, and the part of each rank in a step (any process)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from tritium.data.fingerprint import Table
from tritium.errors import EmptyShard


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


REMAINDERS = ("pad", "drop", "repeat")


@dataclass(frozen=True)
class Share:
    """The part of one rank in one step: ranges [start, stop) of positions in its epoch, usually one range."""

    step: int
    ranges: tuple[tuple[int, int], ...]
    rows: int
    """Rows that count in this rank's mean; 0 where the batch is one repeated row that keeps the rank in step."""
    total: int
    """`rows`, summed over the ranks."""
    scale: float
    """size × rows ÷ total: the mean over ranks of scale × (mean of a rank's rows) is the mean of all rows."""


def step_count(counts: Sequence[int], batch_size: int, remainder: str) -> int:
    """Return the steps of an epoch over shards of `counts` rows."""
    return min(counts) // batch_size if remainder == "drop" else -(-max(counts) // batch_size)


def has_batch_of_one(counts: Sequence[int], batch_size: int, remainder: str) -> bool:
    """Return whether some rank takes a batch of one row in an epoch, also one that only keeps it in step."""
    if remainder != "pad" or batch_size == 1:
        return batch_size == 1
    steps = step_count(counts, batch_size, remainder)
    return any(count % batch_size == 1 or -(-count // batch_size) < steps for count in counts)


def share(step: int, index: int, counts: Sequence[int | None], batch_size: int, remainder: str) -> Share:
    """Return the share of shard `index` in `step`, which must exist.

    counts : rows of every shard; None for one that has not ended, but has all rows of this step.
    """
    start, count_here = step * batch_size, counts[index]
    if remainder != "pad":
        whole = whole_batches(step, len(counts), batch_size)
        return whole if count_here is None else replace(whole, ranges=_wrapped(start, batch_size, count_here))
    of_ranks = [batch_size if count is None else max(0, min(batch_size, count - start)) for count in counts]
    rows, total = of_ranks[index], sum(of_ranks)
    return Share(step, ((start, start + rows),) if rows else ((0, 1),), rows, total, len(of_ranks) * rows / total)


def whole_batches(step: int, size: int, batch_size: int) -> Share:
    """Return the share of any rank in a step in which each of `size` ranks takes a whole batch."""
    start = step * batch_size
    return Share(step, ((start, start + batch_size),), batch_size, batch_size * size, 1.0)


def _wrapped(start: int, rows: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of `rows` positions from `start` on, of which each is taken modulo `count`."""
    ranges = []
    while rows:
        first = start % count
        taken = min(rows, count - first)
        ranges.append((first, first + taken))
        start, rows = start + taken, rows - taken
    return tuple(ranges)


class StepSchedule(Protocol):
    """The shares of one rank in the steps of one epoch."""

    @property
    def visible(self) -> int:
        """Rows of this shard that can be read now."""
        ...

    @property
    def own(self) -> int | None:
        """Rows of this shard in this epoch; None while they still arrive."""
        ...

    def ready(self, step: int) -> bool:
        """Return whether `share(step)` returns without waiting."""
        ...

    def share(self, step: int) -> Share | None:
        """Return this rank's share of the step, or None after the last step, which is the same on every rank."""
        ...


class KnownSchedule:
    """The steps of an epoch of which all counts are known.

    visible : rows of the shard; they differ from its count where the epoch continues at another world size.

    Raises EmptyShard as `check_counts` does.
    """

    def __init__(
        self, name: str, counts: Sequence[int], index: int, batch_size: int, remainder: str, visible: int
    ) -> None:
        check_counts(name, counts, batch_size, remainder)
        self._counts, self._index, self._batch_size, self._remainder = counts, index, batch_size, remainder
        self._steps = step_count(counts, batch_size, remainder)
        self._least = min(counts)
        self.visible = visible
        self.own: int | None = counts[index]

    def ready(self, step: int) -> bool:
        return True

    def share(self, step: int) -> Share | None:
        if step >= self._steps:
            return None
        if (step + 1) * self._batch_size <= self._least:  # Every rank has a whole batch, without a loop over ranks.
            return whole_batches(step, len(self._counts), self._batch_size)
        return share(step, self._index, self._counts, self._batch_size, self._remainder)


class StreamedSchedule:
    """The steps of an epoch whose rows still arrive.

    A step is taken when every rank has all rows of the step's window of `window` rows, or all its rows.
    """

    def __init__(self, name: str, feed: Feed, index: int, batch_size: int, remainder: str, window: int) -> None:
        self._name, self._feed, self._index = name, feed, index
        self._batch_size, self._remainder, self._window = batch_size, remainder, window
        self._watermark = Watermark(0, {}, index + 1)

    @property
    def visible(self) -> int:
        return self._watermark.ended.get(self._index, self._watermark.rows)

    @property
    def own(self) -> int | None:
        return self._watermark.ended.get(self._index)

    def ready(self, step: int) -> bool:
        return self._watermark.complete or self._watermark.rows >= self._needed(step) or self._is_after_last(step)

    def share(self, step: int) -> Share | None:
        if not self.ready(step):
            self._watermark = self._feed.wait(self._needed(step))
        counts = [self._watermark.ended.get(index) for index in range(self._watermark.size)]
        if 0 in counts or (step == 0 and self._is_after_last(0)):
            check_counts(self._name, self._feed.counts(), self._batch_size, self._remainder)
        if self._is_after_last(step):
            return None
        return share(step, self._index, counts, self._batch_size, self._remainder)

    def _needed(self, step: int) -> int:
        """Return the rows that every rank must have: up to the end of the window in which the step begins."""
        return (step * self._batch_size // self._window + 1) * self._window

    def _is_after_last(self, step: int) -> bool:
        """Return whether the counts known so far leave no such step; more counts never add one."""
        ended = list(self._watermark.ended.values())
        if self._watermark.complete or (ended and self._remainder == "drop"):
            return step >= step_count(ended, self._batch_size, self._remainder)
        return False


def check_counts(name: str, counts: Sequence[int], batch_size: int, remainder: str) -> None:
    """Raise EmptyShard, with the same text on every rank, where a shard is empty or the epoch has no step."""
    listed = ", ".join(map(str, counts[:64])) + (", …" if len(counts) > 64 else "")
    rows = f"(rows per rank: {listed})"
    if 0 in counts:
        empty = [index for index, count in enumerate(counts) if count == 0]
        who = f"rank {empty[0]}" if len(empty) == 1 else "ranks " + ", ".join(map(str, empty[:64]))
        raise EmptyShard(
            f"{who} of {len(counts)} received no rows of {name!r} {rows}. Ask for fewer ranks, or check what the "
            "DataFrame holds.",
            counts=list(counts),
        )
    if step_count(counts, batch_size, remainder) == 0:
        raise EmptyShard(
            f"remainder='drop' leaves no step of {name!r} at batch_size={batch_size} {rows}. Take a batch_size of at "
            f"most {min(counts)}, or remainder='pad'.",
            counts=list(counts),
        )
