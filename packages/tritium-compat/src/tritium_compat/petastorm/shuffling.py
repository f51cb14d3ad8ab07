"""Rows of tensors as batches, in their order or shuffled (any process)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

Columns = Mapping[str, Any]  # name -> tensor [rows, ...]


class Batches:
    """Takes rows in pieces of any size and gives them in batches."""

    def __init__(self, batch_size: int, capacity: int = 0) -> None:
        """Set the rows of a batch, and how many rows wait to be shuffled (0: they keep their order)."""
        self._size, self._capacity = batch_size, capacity
        self._rows: dict[str, Any] = {}
        self._order: Any = None
        self._next, self._count = 0, 0

    def add(self, columns: Columns) -> Iterator[dict[str, Any]]:
        """Add rows, and yield the batches that are full and do not leave fewer rows waiting than the capacity."""
        waiting = self._count - self._next
        missing = self._size - waiting
        if waiting and not self._capacity and len(next(iter(columns.values()))) >= missing:
            # One batch over the border is joined, not all rows of a row group with the few that were left.
            rest = self._rows
            yield {name: torch.cat([rest[name][self._next :], rows[:missing]]) for name, rows in columns.items()}
            columns, waiting = {name: rows[missing:] for name, rows in columns.items()}, 0
        if waiting:
            kept = self._order[self._next :] if self._order is not None else slice(self._next, None)
            self._rows = {name: torch.cat([self._rows[name][kept], rows]) for name, rows in columns.items()}
        else:
            self._rows = dict(columns)
        self._next, self._count = 0, len(next(iter(self._rows.values())))
        self._order = torch.randperm(self._count) if self._capacity else None
        yield from self._take(max(self._size, self._capacity + self._size - 1 if self._capacity else 0))

    def finish(self) -> Iterator[dict[str, Any]]:
        """Yield what is left, of which the last batch may be short."""
        yield from self._take(1)

    def _take(self, least: int) -> Iterator[dict[str, Any]]:
        while self._count - self._next >= least:
            chosen: Any = slice(self._next, min(self._next + self._size, self._count))
            self._next = chosen.stop
            if self._order is not None:
                chosen = self._order[chosen]
            yield {name: rows[chosen] for name, rows in self._rows.items()}
