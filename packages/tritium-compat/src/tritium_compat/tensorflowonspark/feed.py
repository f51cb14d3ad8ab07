"""Rows of any kind on their way through Tritium's exchange, and results on their way back (driver and rank)."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np

from tritium import world

NAME = "input"
_BATCH = 256
_numbers = itertools.count()
_rows: dict[int, Any] = {}


def frame(rdd: Any, spark: Any) -> Any:
    """Return the rows of an RDD as a DataFrame of bytes: partition, position in it, and the row itself (driver)."""

    def packed(partition: int, rows: Iterator[Any]) -> Iterator[tuple[bytes]]:
        for position, row in enumerate(rows):
            yield (cloudpickle.dumps((partition, position, row)),)

    return spark.createDataFrame(rdd.mapPartitionsWithIndex(packed), "row binary")


def unpacked(content: bytes) -> Any:
    """Keep a row, and return its number: batches are of arrays, and rows are anything (rank)."""
    number = next(_numbers)
    _rows[number] = cloudpickle.loads(content)
    return np.int64(number)


class Manager:
    """The rows of this rank, `epochs` times, and the results that were given for them: `ctx.mgr` (rank)."""

    def __init__(self, epochs: int) -> None:
        self._rows = self._all(epochs)
        self._open: deque[tuple[int, int]] = deque()  # where the rows without a result are from
        self.results: list[tuple[int, int, Any]] = []
        self.ended = False

    def _all(self, epochs: int) -> Iterator[Any]:
        shard = world().shard(NAME)
        for epoch in shard.epochs(epochs, batch_size=_BATCH, shuffle=False, device=None):
            for batch in epoch:
                numbers = [int(number) for number in batch["row"]]
                there = [_rows.pop(number) for number in numbers]
                yield from there[: batch.rows]  # the others only keep ranks in step

    def take(self, count: int) -> list[Any]:
        """Return the next rows, fewer at the end."""
        if self.ended:
            return []
        found = list(itertools.islice(self._rows, count))
        self.ended = len(found) < count
        self._open.extend((partition, position) for partition, position, _ in found)
        return [row for _, _, row in found]

    def give(self, results: Sequence[Any]) -> None:
        """Take the results of the first rows that have none. Raises ValueError for more results than rows."""
        given = list(results)
        if len(given) > len(self._open):
            raise ValueError(f"batch_results: {len(given)} results, and {len(self._open)} rows that have none.")
        self.results += [(*self._open.popleft(), result) for result in given]

    def end(self) -> None:
        """Take no more rows."""
        self.ended = True

    def answered(self) -> list[tuple[int, int, Any]]:
        """Return the results: partition, position and value. Raises ValueError where rows have none."""
        if self._open or not self.ended:
            left = f"{len(self._open)} rows have" if self._open else "rows were not taken, which have"
            raise ValueError(f"{left} no result: call batch_results for every batch, until should_stop() is true.")
        return self.results
