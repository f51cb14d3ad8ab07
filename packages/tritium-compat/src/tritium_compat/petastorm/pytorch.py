"""`petastorm.pytorch`: batches of tensors from a reader (any process)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from tritium_compat.petastorm.shuffling import Batches

_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.bool_): np.uint8}
_AGAIN = "The last pass over this loader has not ended. Read it to its end, or make another reader and loader."


def decimal_friendly_collate(batch: Sequence[Any]) -> Any:
    """Return rows as a batch: as torch's `default_collate` does, and decimals and strings as lists."""
    first = batch[0]
    if isinstance(first, (Decimal, str, bytes)):
        return batch
    if isinstance(first, Mapping):
        return {key: decimal_friendly_collate([row[key] for row in batch]) for key in first}
    if isinstance(first, Sequence):
        return [decimal_friendly_collate(values) for values in zip(*batch, strict=True)]
    return default_collate(list(batch))


def _for_torch(row: Any) -> dict[str, Any]:
    """Return a row or a batch of a reader as a dict of what torch can hold."""
    values: dict[str, Any] = row._asdict()
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "SUO":
                raise TypeError(
                    f"The field {name!r} holds strings or objects, and a tensor can't. Leave it out by schema_fields=, "
                    "or turn it into numbers by a TransformSpec."
                )
            if value.dtype in _WIDER:
                values[name] = value.astype(_WIDER[value.dtype])
            elif not value.flags.writeable:  # Arrow's memory, over which torch makes no tensor without a warning
                values[name] = value.copy()
        elif isinstance(value, np.bool_):
            values[name] = np.uint8(value)
        elif value is None:
            raise TypeError(f"The field {name!r} is None, and a tensor can't hold it. Fill it in by a TransformSpec.")
    return values


class LoaderBase:
    """What the loaders of a reader have in common: one pass at a time, each from the reader's beginning."""

    reader: Any

    def __init__(self) -> None:
        self._iterating: bool | None = None
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._error is not None:
            raise RuntimeError(f"The last pass over this loader failed: {self._error!r}") from self._error
        if self._iterating:
            raise RuntimeError(_AGAIN)
        if self._iterating is not None:
            self.reader.reset()
        self._iterating = True
        try:
            yield from self._batches()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._iterating = False

    def _batches(self) -> Iterator[Any]:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.stop()
        self.reader.join()


class DataLoader(LoaderBase):
    """Batches of a reader's rows, collated by a function. The last one may be short."""

    def __init__(
        self,
        reader: Any,
        batch_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] = decimal_friendly_collate,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        """Set how.

        collate_fn : of a list of rows (dicts) makes a batch.
        shuffling_queue_capacity : a batch is drawn from as many waiting rows; 0: rows stay in the reader's order.
        """
        super().__init__()
        self.reader, self.batch_size, self.collate_fn = reader, batch_size, collate_fn
        self.shuffling_queue_capacity = shuffling_queue_capacity

    def _batches(self) -> Iterator[Any]:
        if self.reader.batched_output and self.collate_fn is decimal_friendly_collate:
            yield from _column_batches(self.reader, torch.as_tensor, self.batch_size, self.shuffling_queue_capacity)
            return
        batch: list[Any] = []
        for row in _shuffled(self._rows(), self.shuffling_queue_capacity):
            batch.append(row)
            if len(batch) == self.batch_size:
                yield self.collate_fn(batch)
                batch = []
        if batch:
            yield self.collate_fn(batch)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for found in self.reader:
            values = _for_torch(found)
            if self.reader.batched_output:
                yield from (dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True))
            else:
                yield values


def _shuffled(rows: Iterator[Any], capacity: int) -> Iterator[Any]:
    """Yield rows, each drawn from `capacity` waiting ones."""
    waiting: list[Any] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) >= max(capacity, 1):
            place = random.randrange(len(waiting))
            waiting[place], waiting[-1] = waiting[-1], waiting[place]
            yield waiting.pop()
    random.shuffle(waiting)
    yield from waiting


def _column_batches(
    reader: Any, transform: Callable[[Any], Any], batch_size: int, capacity: int
) -> Iterator[dict[str, Any]]:
    batches = Batches(batch_size, capacity)
    for found in reader:
        values = _for_torch(found)
        if not reader.batched_output:
            values = {name: np.asarray(value)[None] for name, value in values.items()}
        yield from batches.add({name: transform(value) for name, value in values.items()})
    yield from batches.finish()


class BatchedDataLoader(LoaderBase):
    """Batches of a reader's rows, as slices of whole columns: for numbers, and much faster than row by row."""

    def __init__(
        self,
        reader: Any,
        batch_size: int = 1,
        transform_fn: Callable[[Any], Any] | None = None,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        """Set how.

        transform_fn : of a column of rows makes a tensor; None: `torch.as_tensor`.
        shuffling_queue_capacity : a batch is drawn from as many waiting rows; 0: rows stay in the reader's order.
        """
        super().__init__()
        self.reader, self.batch_size, self.transform_fn = reader, batch_size, transform_fn or torch.as_tensor
        self.shuffling_queue_capacity = shuffling_queue_capacity

    def _batches(self) -> Iterator[Any]:
        return _column_batches(self.reader, self.transform_fn, self.batch_size, self.shuffling_queue_capacity)


class InMemBatchedDataLoader:
    """Batches of a reader's first rows, which are kept in memory and shuffled in each epoch."""

    def __init__(
        self,
        reader: Any,
        batch_size: int = 1,
        transform_fn: Callable[[Any], Any] | None = None,
        num_epochs: int = 1,
        seed: int = 0,
        rows_capacity: int = 1024,
        shuffle: bool = False,
    ) -> None:
        """Read the rows, and stop the reader.

        rows_capacity : how many rows at most.
        shuffle : the order of an epoch's rows follows from the seed and the epoch.
        """
        self._size, self._epochs, self._seed, self._shuffle = batch_size, num_epochs, seed, shuffle
        self._used = False
        batches = _column_batches(reader, transform_fn or torch.as_tensor, rows_capacity, 0)
        try:
            self._rows = next(batches, {})
        finally:
            batches.close()  # type: ignore[attr-defined]
            reader.stop()
            reader.join()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._used:
            raise RuntimeError("InMemBatchedDataLoader is read once. Say num_epochs= for several passes.")
        self._used = True
        count = len(next(iter(self._rows.values()), ()))
        for epoch in range(self._epochs):
            order = torch.arange(count)
            if self._shuffle:
                order = torch.randperm(count, generator=torch.Generator().manual_seed(self._seed + epoch))
            for start in range(0, count, self._size):
                chosen = order[start : start + self._size]
                yield {name: rows[chosen] for name, rows in self._rows.items()}

    def __enter__(self) -> InMemBatchedDataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        pass
