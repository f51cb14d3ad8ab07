"""A shard as a `keras.utils.PyDataset` (rank)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import keras
import numpy as np

from tritium.data.batch import Batch, filled
from tritium.data.epochs import Epoch, EpochPlan, Epochs, RowSource, Stopwatch
from tritium.data.schema import Field
from tritium.data.spool import Array
from tritium.data.steps import share, step_count
from tritium.errors import BadSetting
from tritium.hints import did_you_mean, suggest

Columns = str | Sequence[str] | Mapping[str, str]


class ShardForKeras(Protocol):
    """The part of `Shard` that is needed here."""

    name: str
    schema: tuple[Field, ...]
    trace: Stopwatch | None

    @property
    def counts(self) -> list[int]: ...


class PlannedShard(ShardForKeras, RowSource, Protocol):
    """A `Shard` that makes plans."""

    def plan(self, n: Any, batch_size: Any, shuffle: Any, seed: Any, remainder: Any) -> EpochPlan: ...


class KerasDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of a rank in one epoch after the other: (x, y), or (x, y, weights).

    All ranks have equally many batches, and in each step batches of the same size: a rank with fewer rows left repeats
    its first one with weight 0, and the others' weights make the mean over the ranks that over all rows of the step.
    Weights are given where rows don't divide evenly, or where there is a column `sample_weight`.
    """

    def __init__(
        self,
        shard: ShardForKeras,
        epochs: Epochs,
        plan: EpochPlan,
        *,
        x: Columns,
        y: Columns | None = None,
        sample_weight: str | None = None,
    ) -> None:
        super().__init__()
        self._shard, self._epochs, self._plan = shard, epochs, plan
        self._x, self._y, self._weight = x, y, sample_weight
        known = [field.name for field in shard.schema]
        for name in [*_names(x), *_names(y), *_names(sample_weight)]:
            if name not in known:
                listed = f"{', '.join(map(repr, known))}.{did_you_mean(name, known)}"
                raise BadSetting(f"shard {shard.name!r} has no column {name!r}. There are: {listed}")
        if sample_weight is not None and y is None:
            raise BadSetting(f"shard {shard.name!r}: sample_weight={sample_weight!r} needs targets: give y=.")
        self._lock = threading.Lock()  # TensorFlow takes batches ahead, in threads of its own.
        self._given: int | None = None
        self._begun = -1
        self._epoch: Epoch | None = None
        self._recorded: set[int] = set()
        self._last = False
        self._asked = 0
        self._measured: Iterator[Batch] | None = None

    def set_epoch(self, number: int) -> None:
        """Let the following batches be those of this epoch, from 0. Else every epoch that begins is the next one."""
        self._given = number

    def __len__(self) -> int:
        """Return the steps of an epoch, the same on every rank. Waits for the rows of all ranks."""
        return step_count(self._shard.counts, self._plan.batch_size, self._plan.remainder)

    def __getitem__(self, step: int) -> tuple[Any, ...]:
        """Return the batch of a step of the current epoch."""
        with self._lock:
            batch = self._take(step)
            self._last = self._last or step == len(self) - 1
        return self._tuple(batch)

    def on_epoch_begin(self) -> None:
        """Continue with the next epoch, unless `set_epoch` has chosen one. Keras calls it."""
        with self._lock:
            self._begun += 1
            self._last = False

    def on_epoch_end(self) -> None:
        """Record the rows of an epoch that was taken to its end. Keras calls it, also where no epoch has begun."""
        with self._lock:
            epoch = self._epoch
            if epoch is not None and self._last and epoch.number not in self._recorded:
                self._recorded.add(epoch.number)
                epoch.end()
            if self._measured is not None:
                self._asked = -1
                next(self._measured, None)  # Ends the trace's epoch.
                self._measured = None

    def _take(self, step: int) -> Batch:
        number = self._given if self._given is not None else max(0, self._begun)
        if self._epoch is None or self._epoch.number != number:
            self._epoch = self._epochs.at(number)
        if self._shard.trace is None or keras.backend.backend() == "tensorflow":
            return self._epoch.batch(step)
        self._asked = step
        if self._measured is None:
            self._measured = self._shard.trace.batches(self._as_asked())
        return next(self._measured)

    def _as_asked(self) -> Iterator[Batch]:
        while self._asked >= 0 and self._epoch is not None:
            yield self._epoch.batch(self._asked)

    def _tuple(self, batch: Batch) -> tuple[Any, ...]:
        rows, weights = self._rows_and_weights(batch)

        def column(name: str) -> Array:
            values = filled(batch[name], rows)
            return values if values.flags.writeable else values.copy()  # Torch warns of read-only arrays.

        x = _arranged(self._x, column)
        if self._y is None:
            return (x,)
        if self._weight is not None:
            of_rows = column(self._weight).astype("float32")
            weights = of_rows if weights is None else of_rows * weights
        return (x, _arranged(self._y, column)) if weights is None else (x, _arranged(self._y, column), weights)

    def _rows_and_weights(self, batch: Batch) -> tuple[int, Array | None]:
        """Return the rows of every rank's batch in this step, and float32 [rows]; None where rows divide evenly."""
        size, counts = self._plan.batch_size, self._shard.counts
        if self._plan.remainder != "pad" or all(count == counts[0] for count in counts):
            return batch.rows, None
        rows_of_ranks = [share(batch.step, index, counts, size, "pad").rows for index in range(len(counts))]
        weights = np.zeros(max(rows_of_ranks), np.float32)
        weights[: batch.rows] = len(rows_of_ranks) * max(rows_of_ranks) / batch.total
        return max(rows_of_ranks), weights


def _names(columns: Columns | None) -> list[str]:
    if columns is None or isinstance(columns, str):
        return [] if columns is None else [columns]
    return list(columns.values() if isinstance(columns, Mapping) else columns)


def _arranged(columns: Columns, column: Any) -> Any:
    if isinstance(columns, str):
        return column(columns)
    if isinstance(columns, Mapping):
        return {name: column(source) for name, source in columns.items()}
    return tuple(column(name) for name in columns)


_SETTINGS = ("x", "y", "batch_size", "sample_weight", "shuffle", "seed", "remainder")


def dataset_of(
    shard: PlannedShard,
    *,
    batch_size: int,
    x: Columns,
    y: Columns | None = None,
    sample_weight: str | None = None,
    shuffle: Literal["full", "stream"] | bool | None = None,
    seed: int = 0,
    remainder: Literal["pad", "drop", "repeat"] = "pad",
    **others: Any,
) -> KerasDataset:
    """Return the dataset of a shard; see `Shard.keras`. Raises BadSetting for settings that it does not have."""
    for name, value in others.items():
        workers = name in ("workers", "use_multiprocessing", "max_queue_size")
        why = "Rows are mapped into memory, and need no workers: leave it out." if workers else suggest(name, _SETTINGS)
        raise BadSetting(f"shard {shard.name!r}: keras() has no {name}={value!r:.40}. {why.lstrip()}")
    plan = shard.plan(1, batch_size, shuffle, seed, remainder)
    if plan.shuffle == "stream":  # Keras takes the batches of an epoch in any order.
        plan = replace(plan, shuffle="full")
    return KerasDataset(shard, Epochs(shard, 1, plan, None, None), plan, x=x, y=y, sample_weight=sample_weight)
