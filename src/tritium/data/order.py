"""The order of the rows in an epoch: positions in the epoch to rows in the spool (rank).

Large permutations have no table: memory is needed only for the positions requested, whatever the size of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tritium.data.idset import PARTITION_BITS, IdSet, in_any

Array = np.ndarray[Any, Any]
Lookup = Callable[[Array], Array]
"""Positions int64 [k] to rows int64 [k]."""
Key = tuple[int, int, int]
"""Seed, epoch and shard index: the shards of an epoch have independent orders."""

ORDER_VERSION = 2
"""Increased whenever one of these orders changes: a saved position means the same row in the same version only."""

_SMALL = 1 << 16
_CHUNK = 1 << 14
_SPAN = 1 << 17  # So many ids are processed together in a few MB, whatever the number of rows.
_READ_SPAN = 1 << 20
_PERMUTED_AHEAD = 1 << 16  # 512 kB at a time, as work between batches evicts the tables from the processor's caches.
_ROUNDS = 5  # With 4, rows 256 to 1024 apart in the epoch depended on each other; with 5 and 6 none did.
_STRIPES = 1024
_WORD = (1 << 64) - 1


class RowOrder(Protocol):
    """The order of a shard's rows in one epoch."""

    def take(self, start: int, stop: int) -> slice | Array:
        """Return the rows at positions start…stop-1: a slice where they are contiguous, else int64 [k]."""
        ...


class IdOrder:
    """Every row, in the order of ids."""

    def __init__(self, by_id: Lookup | None) -> None:
        self._by_id = by_id

    def take(self, start: int, stop: int) -> slice | Array:
        return slice(start, stop) if self._by_id is None else self._by_id(np.arange(start, stop))


class ShuffledOrder:
    """Every row, permuted over the rows sorted by id, so that the order of their arrival makes no difference.

    rows  : the shard's number of rows.
    by_id : the lookup that the function of that name returns.
    block : rows that are permuted together, as in `blocked`.
    """

    def __init__(self, rows: int, by_id: Lookup | None, block: int, key: Key) -> None:
        self._rows = rows
        self._by_id = by_id
        self._permuted = blocked(rows, block, *key)
        self._first = 0
        self._ahead = np.empty(0, np.int64)

    def take(self, start: int, stop: int) -> slice | Array:
        if start < self._first or stop > self._first + len(self._ahead):  # A large call costs far less per row.
            rows = self._permuted(np.arange(start, min(self._rows, max(stop, start + _PERMUTED_AHEAD))))
            self._first, self._ahead = start, rows if self._by_id is None else self._by_id(rows)
        return self._ahead[start - self._first : stop - self._first]


class WindowedOrder:
    """Every row in the order of arrival, permuted within windows of `window` rows; the last one may be shorter.

    rows : returns the shard's number of rows, or None while they arrive.
    """

    def __init__(self, window: int, rows: Callable[[], int | None], key: Key) -> None:
        self._window = window
        self._rows = rows
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


class RemainingOrder:
    """The rest of an interrupted epoch: the rows not in `seen`, from position `taken` on.

    ids : of the whole shard, int64 [rows].
    key : the key of the rest's permutation; None: in the order of ids.

    Takes 8 bytes of memory for each row that is left. Positions before `taken`, which only remainder="repeat" asks for,
    are in the order of ids.
    """

    def __init__(self, ids: Array, by_id: Lookup | None, seen: Sequence[IdSet], taken: int, key: Key | None) -> None:
        left = [
            start + np.flatnonzero(~in_any(seen, ids[start : start + _READ_SPAN]))
            for start in range(0, len(ids), _READ_SPAN)
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


def permutation(n: int, *key: int) -> Lookup:
    """Return a permutation of 0..n-1, chosen by `key` (seed, epoch, …).

    It is the same on every machine and numpy version. Up to 65,536 rows it is a shuffled table; beyond, a keyed
    Feistel network that is applied until its value is below n, whose memory does not depend on n.
    """
    mixed = 0x9E3779B97F4A7C15
    for part in key:
        mixed = _mix(mixed ^ (part & _WORD))
    if n <= _SMALL:
        return _Table(_shuffled(n, mixed))
    return _Feistel(n, mixed)


class _Feistel:
    """A permutation of 0..n-1 without a table."""

    def __init__(self, n: int, key: int) -> None:
        self._n = n
        bits = (n - 1).bit_length()
        self._low_bits = bits // 2
        self._low = np.int64((1 << self._low_bits) - 1)
        widths = (bits - self._low_bits, self._low_bits)
        self._rounds = []
        for turn in range(_ROUNDS):
            key = _mix(key + turn)
            self._rounds.append((np.uint32(key & 0xFFFFFFFF), np.uint32(32 - widths[turn % 2])))

    def __call__(self, positions: Array) -> Array:
        rows = np.empty(len(positions), np.int64)
        for start in range(0, len(positions), _CHUNK):  # A chunk fits into the processor's cache.
            rows[start : start + _CHUNK] = self._once(positions[start : start + _CHUNK])
        outside = np.flatnonzero(rows >= self._n)
        while len(outside):
            again = self._once(rows[outside])
            rows[outside] = again
            outside = outside[again >= self._n]
        return rows

    def _once(self, values: Array) -> Array:
        high = (values >> self._low_bits).astype(np.uint32)
        low = (values & self._low).astype(np.uint32)
        mixed = np.empty_like(high)
        shifted = np.empty_like(high)
        for turn, (key, shift) in enumerate(self._rounds):
            target, source = (high, low) if turn % 2 == 0 else (low, high)
            np.add(source, key, out=mixed)
            np.multiply(mixed, np.uint32(0x9E3779B1), out=mixed)
            np.right_shift(mixed, np.uint32(15), out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, np.uint32(0x85EBCA77), out=mixed)
            np.right_shift(mixed, shift, out=mixed)
            np.bitwise_xor(target, mixed, out=target)
        joined = high.astype(np.int64)
        joined <<= self._low_bits
        joined |= low
        return joined


def blocked(n: int, block: int, *key: int) -> Lookup:
    """Return a permutation of 0..n-1 in which each `block` positions draw from `block` rows only.

    For rows that memory can't hold: a block consists of 1024 stripes of neighbouring rows from all over 0..n-1, and is
    permuted as a whole, so that a disk is read once per epoch, in stripes. With `block` ≥ n it is `permutation`.
    """
    return permutation(n, *key) if block >= n else _Blocked(n, block, key)


class _Blocked:
    """A permutation of 0..n-1 by blocks. Keeps the permutation of the block requested last."""

    def __init__(self, n: int, block: int, key: tuple[int, ...]) -> None:
        self._n, self._block, self._key = n, block, key
        count = min(n, -(-n * _STRIPES // block))
        sizes = np.full(count, n // count)
        sizes[: n % count] += 1
        order = permutation(count, *key)(np.arange(count))
        self._stripes = _Runs((np.cumsum(sizes) - sizes)[order], sizes[order])
        self._number = -1
        self._permuted: Lookup = permutation(0)

    def __call__(self, positions: Array) -> Array:
        rows = np.empty(len(positions), np.int64)
        numbers = positions // self._block
        for number in np.unique(numbers).tolist():
            first, inside = number * self._block, numbers == number
            if number != self._number:
                length = min(self._block, self._n - first)
                self._number, self._permuted = number, permutation(length, *self._key, number)
            rows[inside] = self._permuted(positions[inside] - first) + first
        return self._stripes(rows)


def by_id(ids: Array) -> Lookup | None:
    """Return the lookup from a position among the rows sorted by id to the row in the spool.

    ids : int64 [rows], in the order of arrival. None is returned where they arrived sorted.

    Rows that arrive in ascending runs, one source partition each (as a shuffle delivers them), take memory for the
    runs only; any other order takes a table of 8 bytes per row.
    """
    starts = np.concatenate([np.zeros(1, np.int64), *_breaks(ids)])
    if len(starts) == 1:
        return None
    lengths = np.diff(starts, append=len(ids))
    first, last = ids[starts], ids[starts + lengths - 1]
    order = np.argsort(first, kind="stable")
    if np.any(last[order][:-1] > first[order][1:]):
        return _Table(np.argsort(ids, kind="stable"))
    return _Runs(starts[order], lengths[order])


class _Table:
    def __init__(self, rows: Array) -> None:
        self._rows = rows

    def __call__(self, positions: Array) -> Array:
        return self._rows.take(positions)


class _Runs:
    """The lookup for runs of rows put one after another: run i is `lengths[i]` rows from row `starts[i]` on."""

    def __init__(self, starts: Array, lengths: Array) -> None:
        self._ends = np.cumsum(lengths)
        self._shift = starts - (self._ends - lengths)

    def __call__(self, positions: Array) -> Array:
        run = np.searchsorted(self._ends, positions, side="right")
        rows: Array = positions + self._shift[run]
        return rows


def _breaks(ids: Array) -> Iterator[Array]:
    """Yield the rows at which runs begin: where the id falls and, if it falls anywhere, where the partition changes."""
    if all(np.all(part[1:] > part[:-1]) for part in _overlapping(ids)):
        return
    for number, part in enumerate(_overlapping(ids)):
        fresh = (part[1:] < part[:-1]) | (part[1:] >> PARTITION_BITS != part[:-1] >> PARTITION_BITS)
        yield np.flatnonzero(fresh) + 1 + number * _SPAN


def _overlapping(ids: Array) -> Iterator[Array]:
    for start in range(0, len(ids), _SPAN):
        yield ids[start : start + _SPAN + 1]


def _shuffled(n: int, key: int) -> Array:
    """Return 0..n-1 sorted by a hash of each: splitmix64, since numpy's own generators may change."""
    with np.errstate(over="ignore"):
        z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


def _mix(value: int) -> int:
    """Return splitmix64 of one word."""
    z = (value + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)
