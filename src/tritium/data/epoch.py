"""One epoch over a shard, step by step (rank)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import islice, takewhile
from typing import Any, Literal, Protocol

import numpy as np

from tritium.data.batch import Batch, Gather, Rows
from tritium.data.order import RowOrder
from tritium.data.remainder import Share, StepSchedule
from tritium.data.spool import Array

OnEpochEnd = Callable[[dict[str, Any]], None]
OnBatch = Callable[[int, int], None]
_SPAN = 1 << 20


class Stopwatch(Protocol):
    """A measurement of the parts of each step's time, such as `observe.trace.Trace`."""

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]: ...
    def within(self, section: Literal["copy to device"]) -> AbstractContextManager[None]: ...


class Group:
    """The batches of one optimizer step. A batch is released when the next one is requested, the last at the end.

    total    : the rows that count in the step's mean, over all its batches and all ranks.
    taken    : the batches taken so far.
    """

    def __init__(self, batches: Iterator[Batch], count: int, total: int) -> None:
        self.total = total
        self._batches, self._count = batches, count
        self.taken: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self.taken.append(batch)
            yield batch
            batch.release()

    @property
    def at_last(self) -> bool:
        """Whether the batch taken last is the last one of the group."""
        return len(self.taken) == self._count


class Epoch:
    """The batches of one epoch. Iterating takes them one by one, and continues after the last one taken.

    number : its number, from 0.
    taken  : the steps taken so far, the current batch included.
    first  : the step at which a resumed epoch began, else 0.
    ended  : whether every step has been taken.
    """

    def __init__(
        self,
        number: int,
        schedule: StepSchedule,
        order: RowOrder,
        gather: Gather,
        *,
        steps: Callable[[], int],
        counts: Callable[[], list[int]],
        on_end: Callable[[Epoch], None],
        on_batch: OnBatch | None = None,
        trace: Stopwatch | None = None,
        taken: int = 0,
    ) -> None:
        self.number = number
        self.taken = taken
        self.ended = False
        self.first = taken
        self._schedule, self._order, self._gather = schedule, order, gather
        self._steps, self._counts = steps, counts
        self._on_end, self._on_batch, self._trace = on_end, on_batch, trace

    @property
    def steps(self) -> int:
        """Steps of the whole epoch, the same on every rank. Waits until the shards of all ranks are complete."""
        return self._steps()

    @property
    def counts(self) -> list[int]:
        """Rows of every rank in this epoch. Waits until the shards of all ranks are complete."""
        return self._counts()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return self._batches() if self._trace is None else self._trace.batches(self._batches())

    def _batches(self) -> Iterator[Batch]:
        with self._gathering() as gather:
            ahead: Callable[[], Any] | None = None
            while not self.ended:
                share = self._schedule.share(self.taken)
                if share is None:
                    self.end()
                    return
                columns = (ahead or gather(share))()
                ahead = None
                if self._gather.ahead and self._schedule.ready(self.taken + 1):
                    following = self._schedule.share(self.taken + 1)
                    ahead = None if following is None else gather(following)
                self.taken += 1
                if self._on_batch is not None:
                    self._on_batch(self.number, share.step)
                batch = Batch(
                    self._placed(columns),
                    scale=share.scale,
                    rows=share.rows,
                    total=share.total,
                    step=share.step,
                    epoch=self.number,
                    read=functools.partial(self._read_again, share),
                    schema=self._gather.schema,
                    decode=self._gather.decode,
                )
                del columns  # The batch alone must hold them, so that release() frees them.
                yield batch

    def finish(self) -> None:
        """End the epoch now if it is known, without waiting, that no step is left.

        For a loop that counts the steps, and does not ask for one more than there are.
        """
        if not self.ended and self._schedule.ready(self.taken) and self._schedule.share(self.taken) is None:
            self.end()

    def batch(self, step: int) -> Batch:
        """Return the batch of any step, from 0, without taking it."""
        share = self._schedule.share(step)
        if share is None:
            raise IndexError(step)
        if self._on_batch is not None:
            self._on_batch(self.number, step)
        columns = self._placed(self._gather.take(self._rows(share)))
        return Batch(
            columns,
            scale=share.scale,
            rows=share.rows,
            total=share.total,
            step=step,
            epoch=self.number,
            schema=self._gather.schema,
            decode=self._gather.decode,
        )

    def end(self) -> None:
        """Record the epoch as taken to its end."""
        self.ended = True
        self._on_end(self)

    def groups(self, count: int) -> Iterator[Group]:
        """Yield groups of up to `count` batches. Each must be consumed to its end; one batch at a time is in memory."""
        batches = iter(self)
        while shares := self._following(count):
            yield Group(islice(batches, len(shares)), len(shares), sum(share.total for share in shares))
        next(batches, None)  # No batch is left: this call ends the epoch.

    def _following(self, count: int) -> list[Share]:
        """Return this rank's shares of up to `count` steps from the next one on."""
        ahead = (self._schedule.share(self.taken + number) for number in range(count))
        return list(takewhile(lambda share: share is not None, ahead))  # type: ignore[arg-type]

    def _read_again(self, share: Share) -> dict[str, Any]:
        return self._gather.place(self._gather.take(self._rows(share)))

    def _placed(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self._trace is None:
            return self._gather.place(columns)
        with self._trace.within("copy to device"):
            return self._gather.place(columns)

    @contextmanager
    def _gathering(self) -> Iterator[Callable[[Share], Callable[[], dict[str, Any]]]]:
        """Yield a function that starts to gather a share's columns, and returns a function that waits for them.

        Batches for the CPU are gathered by this thread when they are waited for, those for another device by a thread
        of their own, one batch ahead.
        """
        if not self._gather.ahead:
            yield lambda share: lambda: self._gather.take(self._rows(share))
            return
        with ThreadPoolExecutor(1, "tritium-batches") as pool:

            def begin(share: Share) -> Callable[[], dict[str, Any]]:
                future: Future[dict[str, Any]] = pool.submit(self._gather.take, self._rows(share))
                return future.result

            yield begin

    def seen(self, batch_size: int) -> Iterator[Array]:
        """Yield the ids of the rows taken so far, int64 [k], in pieces."""
        taken, available = self.taken * batch_size, self._schedule.own
        taken = taken if available is None else min(taken, available)
        for start in range(self.first * batch_size, taken, _SPAN):
            yield self._gather.reader.ids[self._order.take(start, min(start + _SPAN, taken))]

    def _rows(self, share: Share) -> Rows:
        """Return where the rows of a share lie in the spool: a slice, or int64 [k]."""
        self._gather.reader.extend(self._schedule.visible)
        if len(share.ranges) == 1:
            return self._order.take(*share.ranges[0])
        parts = [self._order.take(start, stop) for start, stop in share.ranges]
        return np.concatenate([np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in parts])
