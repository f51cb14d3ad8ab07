"""The way through a shard's rows in one epoch: positions in the epoch → rows as they lie in the spool (rank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tritium.data.idset import IdSet, in_any
from tritium.data.order import Array, Lookup, blocked, permutation

_AHEAD = 1 << 16  # 512 kB; batches in between drive what this needs out of the processor's caches
_SPAN = 1 << 20


class Route(Protocol):
    """Positions in an epoch to rows."""

    def take(self, start: int, stop: int) -> slice | Array:
        """The rows at positions start…stop-1: a slice where they are contiguous, else int64 [k]."""
        ...


Key = tuple[int, int, int]  # seed, epoch, shard: shards of one epoch have orders that have nothing in common


class Straight:
    """Every row by id."""

    def __init__(self, by_id: Lookup | None) -> None:
        self._by_id = by_id

    def take(self, start: int, stop: int) -> slice | Array:
        return slice(start, stop) if self._by_id is None else self._by_id(np.arange(start, stop))


class Shuffled:
    """Every row, permuted over the rows sorted by id: the order of their arrival makes no difference.

    With `block` below `rows`, permuted by blocks of that many rows.
    """

    def __init__(self, rows: int, by_id: Lookup | None, block: int, key: Key) -> None:
        self._rows = rows
        self._by_id = by_id
        self._permuted = blocked(rows, block, *key)
        self._first = 0
        self._ahead = np.empty(0, np.int64)

    def take(self, start: int, stop: int) -> slice | Array:
        if start < self._first or stop > self._first + len(self._ahead):  # many at once cost far less each
            rows = self._permuted(np.arange(start, min(self._rows, max(stop, start + _AHEAD))))
            self._first, self._ahead = start, rows if self._by_id is None else self._by_id(rows)
        return self._ahead[start - self._first : stop - self._first]


class Windows:
    """Every row in the order of arrival, permuted within windows of `window` rows; the last one may be shorter."""

    def __init__(self, window: int, rows: Callable[[], int | None], key: Key) -> None:
        self._window = window
        self._rows = rows  # in all; None as long as they arrive
        self._key = key
        self._number = -1
        self._permuted: Lookup = permutation(0)

    def take(self, start: int, stop: int) -> slice | Array:
        parts = []
        while start < stop:
            number = start // self._window
            end = min(stop, (number + 1) * self._window)
            parts.append(self._within(number, start, end))
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _within(self, number: int, start: int, stop: int) -> Array:
        first = number * self._window
        if number != self._number:
            rows = self._rows()
            length = self._window if rows is None else min(self._window, rows - first)
            self._number, self._permuted = number, permutation(length, *self._key, number)
        return self._permuted(np.arange(start - first, stop - first)) + first


class Rest:
    """What is left of an epoch that was interrupted: the rows not in `seen`, from position `taken` on.

    Permuted by `key`; by id where that is None.

    Needs 8 bytes for each row that is left. Positions before `taken` (asked for only by rows that repeat) are by id.
    """

    def __init__(self, ids: Array, by_id: Lookup | None, seen: Sequence[IdSet], taken: int, key: Key | None) -> None:
        left = [
            start + np.flatnonzero(~in_any(seen, ids[start : start + _SPAN])) for start in range(0, len(ids), _SPAN)
        ]
        rows = np.concatenate(left)
        self.rows = rows[np.argsort(ids[rows], kind="stable")]
        self._by_id = by_id
        self._all = len(ids)
        self._taken = taken
        self._permuted = None if key is None else permutation(len(self.rows), *key, taken)

    def take(self, start: int, stop: int) -> slice | Array:
        positions = np.arange(start, stop)
        before = positions[positions < self._taken] % self._all
        after = positions[len(before) :] - self._taken
        old = before if self._by_id is None else self._by_id(before)
        return np.concatenate([old, self.rows[after if self._permuted is None else self._permuted(after)]])
