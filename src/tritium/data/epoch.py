"""One pass over a shard, step by step (rank)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import islice, takewhile
from typing import Any, Literal, Protocol

import numpy as np

from tritium.data.batch import Batch, Gather, Rows
from tritium.data.policy import Schedule, Share
from tritium.data.route import Route
from tritium.data.spool import Array

Note = Callable[[dict[str, Any]], None]
Took = Callable[[int, int], None]
_SPAN = 1 << 20


class Stopwatch(Protocol):
    """What is told of where the time goes; `observe.trace.Trace` is one."""

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]: ...
    def within(self, section: Literal["copy to device"]) -> AbstractContextManager[None]: ...


class Group:
    """Batches that make one optimizer step. Each is let go of when the next one is asked for, and the last at the end.

    total : the rows that count in its mean, over all batches and ranks.
    """

    def __init__(self, batches: Iterator[Batch], count: int, total: int) -> None:
        self.total = total
        self._batches, self._count = batches, count
        self.taken: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self.taken.append(batch)
            yield batch
            batch.let_go()

    @property
    def at_last(self) -> bool:
        """Whether the batch that was taken last is the last one."""
        return len(self.taken) == self._count


class Epoch:
    """The batches of one epoch. Iterating takes them one by one, and goes on where it was left.

    number : which epoch, from 0.
    taken  : steps taken so far; the batch in hand is among them.
    first  : the step at which a resumed epoch began, else 0.
    over   : whether every step has been taken.
    """

    def __init__(
        self,
        number: int,
        schedule: Schedule,
        route: Route,
        gather: Gather,
        *,
        steps: Callable[[], int],
        ended: Callable[[Epoch], None],
        took: Took | None = None,
        trace: Stopwatch | None = None,
        taken: int = 0,
    ) -> None:
        self.number = number
        self.taken = taken
        self.over = False
        self.first = taken
        self._schedule, self._route, self._gather = schedule, route, gather
        self._steps, self._ended, self._took, self._trace = steps, ended, took, trace

    @property
    def steps(self) -> int:
        """Steps of the whole epoch, the same on every rank. Waits until the shards of all ranks are complete."""
        return self._steps()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return self._batches() if self._trace is None else self._trace.batches(self._batches())

    def _batches(self) -> Iterator[Batch]:
        with self._worker() as prepare:
            ahead: Callable[[], Any] | None = None
            while not self.over:
                share = self._schedule.share(self.taken)
                if share is None:
                    self.over = True
                    self._ended(self)
                    return
                columns = (ahead or prepare(share))()
                ahead = None
                if self._gather.ahead and self._schedule.ready(self.taken + 1):
                    following = self._schedule.share(self.taken + 1)
                    ahead = None if following is None else prepare(following)
                self.taken += 1
                if self._took is not None:
                    self._took(self.number, share.step)
                batch = Batch(
                    self._placed(columns),
                    scale=share.scale,
                    rows=share.rows,
                    total=share.total,
                    step=share.step,
                    epoch=self.number,
                    read=functools.partial(self._again, share),
                )
                del columns  # the batch alone holds them, and may let go
                yield batch

    def groups(self, count: int) -> Iterator[Group]:
        """The batches in groups of up to `count`, each to be taken to its end; one batch at a time is in memory."""
        batches = iter(self)
        while shares := self._next(count):
            yield Group(islice(batches, len(shares)), len(shares), sum(share.total for share in shares))
        next(batches, None)  # the epoch is over

    def _next(self, count: int) -> list[Share]:
        """Up to `count` steps from the next one on."""
        ahead = (self._schedule.share(self.taken + number) for number in range(count))
        return list(takewhile(lambda share: share is not None, ahead))  # type: ignore[arg-type]

    def _again(self, share: Share) -> dict[str, Any]:
        return self._gather.place(self._gather.take(self._rows(share)))

    def _placed(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self._trace is None:
            return self._gather.place(columns)
        with self._trace.within("copy to device"):
            return self._gather.place(columns)

    @contextmanager
    def _worker(self) -> Iterator[Callable[[Share], Callable[[], dict[str, Any]]]]:
        """What makes a batch: this thread, when asked; for another device one thread that is a batch ahead."""
        if not self._gather.ahead:
            yield lambda share: lambda: self._gather.take(self._rows(share))
            return
        with ThreadPoolExecutor(1, "tritium-batches") as pool:

            def prepare(share: Share) -> Callable[[], dict[str, Any]]:
                future: Future[dict[str, Any]] = pool.submit(self._gather.take, self._rows(share))
                return future.result

            yield prepare

    def seen(self, batch_size: int) -> Iterator[Array]:
        """The ids of the rows taken so far, in pieces."""
        taken, own = self.taken * batch_size, self._schedule.own
        taken = taken if own is None else min(taken, own)
        for start in range(self.first * batch_size, taken, _SPAN):
            yield self._gather.reader.ids[self._route.take(start, min(start + _SPAN, taken))]

    def _rows(self, share: Share) -> Rows:
        """Where the rows of a share lie in the spool."""
        self._gather.reader.extend(self._schedule.visible)
        if len(share.ranges) == 1:
            return self._route.take(*share.ranges[0])
        parts = [self._route.take(start, stop) for start, stop in share.ranges]
        return np.concatenate([np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in parts])
