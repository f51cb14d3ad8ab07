"""The epochs of one call of `Shard.epochs`, each step by step, and the position in them (rank)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice, takewhile
from typing import Any, Literal, Protocol

import numpy as np

from tritium.data.batch import Batch, Gather, Rows
from tritium.data.decode import Decoder
from tritium.data.fingerprint import REDRAWN, compare, differences, summary
from tritium.data.idset import IdSet
from tritium.data.order import (
    ORDER_VERSION,
    IdOrder,
    Lookup,
    RemainingOrder,
    RowOrder,
    ShuffledOrder,
    WindowedOrder,
)
from tritium.data.resume import State, checked_state, checked_states, resharded
from tritium.data.schema import Field
from tritium.data.spool import Array, SpoolReader
from tritium.data.steps import Feed, KnownSchedule, Share, StepSchedule, StreamedSchedule, step_count
from tritium.errors import DataChanged, DataError

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
        """End the epoch if it is known without waiting that no step is left.

        It is for a loop that counts the steps itself, and so never asks for one more.
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


@dataclass(frozen=True)
class EpochPlan:
    """The settings that decide the order of the rows: with the same plan and data, two runs take the same batches."""

    batch_size: int
    shuffle: str | bool
    seed: int
    remainder: str
    size: int
    window: int


class RowSource(Protocol):
    """The part of `Shard` that an epoch needs. A property may wait until the rows have arrived."""

    name: str
    index: int
    feed: Feed
    on_batch: OnBatch | None
    trace: Stopwatch | None
    schema: tuple[Field, ...]

    @property
    def decode(self) -> Mapping[str, Decoder]: ...
    @property
    def counts(self) -> list[int]: ...
    @property
    def reader(self) -> SpoolReader: ...
    @property
    def by_id(self) -> Lookup | None: ...
    @property
    def block(self) -> int: ...
    @property
    def packed_ids(self) -> list[str]: ...
    def record(self, counts: dict[str, Any]) -> None: ...
    def notify(self, text: str) -> None: ...


class Epochs:
    """Iterator over the epochs of one call, and the position in them.

    A state is a position. In an epoch that is a plain permutation, its step says which rows were seen; in one that
    was streamed, or continued at another world size, the state lists their ids, and the other rows are permuted again.

    shard      : the source of the rows.
    n          : the number of epochs, the finished ones of a resumed run included.
    plan       : decides the order of the rows.
    device     : the device of the columns of a batch: a torch.device, "auto", or None for NumPy.
    resume     : the state of this rank, or of all ranks in rank order; None to start at the first epoch.
    if_changed : where the rows are not those of the state, "refuse" raises DataChanged, and "restart" its epoch.

    Raises BadSetting where `resume` does not fit `plan`.
    """

    def __init__(
        self,
        shard: RowSource,
        n: int,
        plan: EpochPlan,
        device: Any,
        resume: State | Sequence[State] | None,
        if_changed: str = "refuse",
    ) -> None:
        self._shard, self._n, self.plan, self._device = shard, n, plan, device
        self._if_changed = if_changed
        self._verified = False
        first = resume if isinstance(resume, Mapping) else resume[0] if resume else {}
        self._partitions = first.get("partitions")
        self._epoch: Epoch | None = None
        self._others: Sequence[State] = ()
        self._resume: State | None = None
        if isinstance(resume, Mapping):
            self._resume = checked_state(resume, asdict(plan), shard.name, shard.index)
        elif resume is not None:
            self._resume, self._others = checked_states(resume, asdict(plan), shard.name, shard.index)

    def __iter__(self) -> Iterator[Epoch]:
        first, step = self._start()
        for number in range(first, self._n):
            self._epoch = self._make(number, step if number == first else 0)
            yield self._epoch

    def at(self, number: int) -> Epoch:
        """Return any epoch, of which batches are taken by `Epoch.batch`; the position stays where it is."""
        return self._make(number, 0)

    def state(self) -> dict[str, Any]:
        """Return the position as JSON.

        Waits until all shards are complete: only then is the fingerprint known by which a resumed run can tell whether
        the ids mean the same rows again.
        """
        self._shard.counts  # noqa: B018 - reading it waits for the rows
        (number, step), epoch, plan = self._start(), self._epoch, self.plan
        if epoch is not None:
            number, step = (epoch.number + 1, 0) if epoch.ended else (epoch.number, epoch.taken)
        state: dict[str, Any] = {"epoch": number, "step": step, "index": self._shard.index, **asdict(plan)}
        state["order"] = ORDER_VERSION
        if self._shard.feed.fingerprint is not None:
            state["fingerprint"] = summary(self._shard.feed.fingerprint)
            if self._shard.index == 0:
                state["partitions"] = self._shard.feed.fingerprint
        if step == 0:
            return state
        if self._is_listed(number):
            fresh = [] if epoch is None else [IdSet.of(ids).pack() for ids in epoch.seen(plan.batch_size)]
            state["seen"] = self._seen(number) + fresh
            if number in self._given_counts:
                state["counts"] = self._given_counts[number]
            return state
        state |= {"counts": self._shard.counts, "ids": self._shard.packed_ids}
        if plan.shuffle is not False:
            state["block"] = self._block
        return state

    # ---- The beginning

    def _start(self) -> tuple[int, int]:
        """Return (epoch, step) to begin at. Where there is something to resume, the first call waits for all rows."""
        if not self._verified and (self._resume or self._others):
            self._verified = True
            self._verify(self._others[0] if self._others else self._resume or {})
        if self._others:
            shard, others = self._shard, self._others
            counts, self._others = shard.counts, ()
            shard.reader.extend(counts[shard.index])
            self._resume = resharded(others, shard.name, shard.index, counts, shard.reader.ids, self.plan.batch_size)
        return (self._resume["epoch"], self._resume["step"]) if self._resume else (0, 0)

    def _verify(self, state: State) -> None:
        """Restart the epoch of `state` where its ids or its order mean other rows now.

        All ranks decide alike, as they have the same state and fingerprint. Raises DataChanged.
        """
        other_rows = self._other_rows(state)
        if other_rows is None and ("seen" in state or state.get("order") == ORDER_VERSION):
            return
        if state["step"]:
            why = other_rows or "another version of Tritium ordered its rows otherwise"
            hint = " Data(row_key=…) keeps the ids." if other_rows else ""
            self._shard.notify(
                f"shard {self._shard.name!r}: {why}, so epoch {state['epoch'] + 1} starts over (after step "
                f"{state['step']}).{hint}"
            )
        self._others, self._resume = (), {"epoch": state["epoch"], "step": 0}

    def _other_rows(self, state: State) -> str | None:
        """Return a clause for the user about a change of the ids since `state`; None where they mean the same rows.

        Raises DataChanged where the rows differ and `if_changed` refuses that.
        """
        shard, before = self._shard, state.get("fingerprint")
        if before is None or not shard.counts or shard.feed.fingerprint is None:  # The counts arrive last.
            return None
        verdict = compare(before, summary(shard.feed.fingerprint))
        if verdict == "same":
            return None
        left = state["epoch"] < self._n  # Only an epoch that is left can restart on the current rows.
        if verdict == "changed" and (self._if_changed == "refuse" or not left):
            rows = summary(shard.feed.fingerprint)["rows"]
            where = differences(self._partitions, shard.feed.fingerprint) if self._partitions else ""
            advice = (
                "Train on the same rows, start over in another run_dir, or restart the epoch on the current rows: "
                'if_changed="restart" (of an estimator: if_data_changed="restart").'
                if left
                else f"All epochs ({self._n}) had ended, so none can restart on the current rows: train on the same "
                "rows, or start over in another run_dir."
            )
            raise DataChanged(
                f"shard {shard.name!r} can't resume: the rows are not those of the checkpoint: {rows} rows, were "
                f"{before['rows']}{'; ' if where else ''}{where}. {advice}{REDRAWN}",
                shard=shard.name,
                rows=rows,
                before=before["rows"],
            )
        return "its rows have changed" if verdict == "changed" else "Spark gave the same rows other ids this time"

    @property
    def _given_counts(self) -> dict[int, list[int]]:
        """Epoch → the counts of an epoch that continues at another world size: rows seen before, and those left."""
        if self._resume and "seen" in self._resume and "counts" in self._resume:
            return {self._resume["epoch"]: self._resume["counts"]}
        return {}

    def _seen(self, number: int) -> list[str]:
        """Return the packed ids that the resumed state lists for this epoch."""
        return list(self._resume.get("seen", ())) if self._resume and self._resume["epoch"] == number else []

    def _is_listed(self, number: int) -> bool:
        """Return whether a state lists the ids of the rows seen in this epoch."""
        return bool(self._seen(number)) or (self.plan.shuffle == "stream" and number == 0)

    @property
    def _block(self) -> int:
        """Rows permuted together: as when the epoch began, also where it continues with less or more memory."""
        return int(self._resume["block"]) if self._resume and "block" in self._resume else self._shard.block

    # ---- An epoch

    def _is_streamed(self, number: int, step: int) -> bool:
        return self.plan.shuffle == "stream" and number == 0 and step == 0

    def _make(self, number: int, step: int) -> Epoch:
        shard, plan = self._shard, self.plan
        size, remainder = plan.batch_size, plan.remainder
        schedule: StepSchedule
        if self._is_streamed(number, step):
            schedule = StreamedSchedule(shard.name, shard.feed, shard.index, size, remainder, plan.window)
        else:
            counts, rows = self._counts(number), shard.counts[shard.index]
            schedule = KnownSchedule(shard.name, counts, shard.index, size, remainder, rows)
        return Epoch(
            number,
            schedule,
            self._row_order(number, step, schedule),
            Gather(shard.name, shard.reader, shard.decode, self._device, shard.schema),
            steps=lambda: step_count(self._counts(number), size, remainder),
            counts=lambda: self._counts(number),
            on_end=self._on_epoch_end,
            on_batch=shard.on_batch,
            trace=shard.trace,
            taken=step,
        )

    def _row_order(self, number: int, step: int, schedule: StepSchedule) -> RowOrder:
        shard, plan = self._shard, self.plan
        key = (plan.seed, number, shard.index)
        if self._is_streamed(number, step):
            return WindowedOrder(plan.window, lambda: schedule.own, key)
        rows = shard.counts[shard.index]
        shard.reader.extend(rows)
        if step == 0 or not self._is_listed(number):
            return IdOrder(shard.by_id) if plan.shuffle is False else ShuffledOrder(rows, shard.by_id, self._block, key)
        taken, seen = step * plan.batch_size, [IdSet.unpack(text) for text in self._seen(number)]
        rest = RemainingOrder(shard.reader.ids, shard.by_id, seen, taken, key if plan.shuffle is not False else None)
        left = max(0, self._counts(number)[shard.index] - taken)
        if len(rest.rows) != left:
            raise DataError(
                f"shard {shard.name!r} of rank {shard.index} can't resume: of its {rows} rows {len(rest.rows)} are not "
                f"among those seen, and {left} should be. The DataFrame has been computed again with other row ids; "
                "restart the epoch, or give Data(row_key=…)."
            )
        return rest

    def _counts(self, number: int) -> list[int]:
        """Return the rows of every index in this epoch. Raises DataError where they are not those of the state."""
        counts = self._shard.counts
        if number in self._given_counts:
            return self._given_counts[number]
        then = self._resume.get("counts", counts) if self._resume else counts
        if then != counts and not self._given_counts:
            raise DataError(
                f"shard {self._shard.name!r} can't resume: it has {counts} rows per rank, and had {then} when the "
                "state was taken. Restart the epoch, or give the same DataFrame."
            )
        return counts

    def _on_epoch_end(self, epoch: Epoch) -> None:
        """Record the rows used, padded, dropped and repeated in the epoch."""
        size, steps, remainder = self.plan.batch_size, epoch.steps, self.plan.remainder
        count, taken, before = self._counts(epoch.number)[self._shard.index], steps * size, epoch.first * size
        self._shard.record(
            {
                "shard": self._shard.name,
                "epoch": epoch.number,
                "steps": steps,
                "rows": self._shard.counts[self._shard.index],
                "used": max(0, min(taken, count) - before),
                "padded": max(0, steps - max(-(-count // size), epoch.first)) if remainder == "pad" else 0,
                "dropped": max(0, count - taken),
                "repeated": max(0, taken - max(count, before)) if remainder == "repeat" else 0,
                "shuffle_score": self._shuffle_score(epoch.number),
            }
        )

    def _shuffle_score(self, number: int) -> float:
        """Return the share of the shard's rows among which a row's place in the epoch is drawn, 0 to 1."""
        if self.plan.shuffle is False:
            return 0.0
        drawn = self.plan.window if self._is_streamed(number, 0) else self._block
        return min(1.0, drawn / self._shard.counts[self._shard.index])
