"""In which order rows are taken: permutations that need no table, and rows sorted by id (any process).

Everything here maps an array of positions to an array of rows, and needs memory for those positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tritium.data.idset import PARTITION_BITS

Array = np.ndarray[Any, Any]
Lookup = Callable[[Array], Array]

ORDER = 2
"""Which orders these are: a position of another number means another row."""

_SMALL = 1 << 16
_CHUNK = 1 << 14
_SPAN = 1 << 17  # ids looked at together: what is computed of them takes a few MB, whatever the rows
_ROUNDS = 5  # with 4, rows 256 to 1024 apart in the epoch were seen to depend on each other; with 5 and 6 none were
_STRIPES = 1024
_WORD = (1 << 64) - 1


def permutation(n: int, *key: int) -> Lookup:
    """A permutation of 0..n-1, chosen by `key` (seed, epoch, …): positions int64 [k] → rows int64 [k].

    The same on every machine and numpy version. Up to 65,536 rows it is a shuffled table; beyond, a keyed
    Feistel network walked until it lands below n, whose memory does not depend on n.
    """
    mixed = 0x9E3779B97F4A7C15
    for part in key:
        mixed = _mix(mixed ^ (part & _WORD))
    if n <= _SMALL:
        return _Table(_shuffled(n, mixed))
    return _Feistel(n, mixed)


class _Feistel:
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
        for start in range(0, len(positions), _CHUNK):  # what fits into the processor's cache at once
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
    """As `permutation`, where each `block` positions draw from `block` rows only: for rows that memory can't hold.

    A block is made of 1024 stripes of neighbouring rows from all over 0..n-1, and permuted as a whole, so a disk is
    read once an epoch, in stripes.
    """
    return permutation(n, *key) if block >= n else _Blocked(n, block, key)


class _Blocked:
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
    """Position among the rows sorted by id → row as it arrived; None where the rows arrived sorted.

    Rows that arrive in ascending runs, one source partition each (as a shuffle delivers them), need memory
    for the runs only; any other order needs a table of 8 bytes a row.
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
    def __init__(self, starts: Array, lengths: Array) -> None:
        self._ends = np.cumsum(lengths)
        self._shift = starts - (self._ends - lengths)

    def __call__(self, positions: Array) -> Array:
        run = np.searchsorted(self._ends, positions, side="right")
        rows: Array = positions + self._shift[run]
        return rows


def _breaks(ids: Array) -> Iterator[Array]:
    """Where the id falls; if it falls anywhere, also where the source partition changes."""
    if all(np.all(part[1:] > part[:-1]) for part in _overlapping(ids)):
        return
    for number, part in enumerate(_overlapping(ids)):
        fresh = (part[1:] < part[:-1]) | (part[1:] >> PARTITION_BITS != part[:-1] >> PARTITION_BITS)
        yield np.flatnonzero(fresh) + 1 + number * _SPAN


def _overlapping(ids: Array) -> Iterator[Array]:
    for start in range(0, len(ids), _SPAN):
        yield ids[start : start + _SPAN + 1]


def _shuffled(n: int, key: int) -> Array:
    """0..n-1 sorted by a hash of each: splitmix64, since numpy's own generators may change."""
    with np.errstate(over="ignore"):
        z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


def _mix(value: int) -> int:
    """splitmix64 of one word."""
    z = (value + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)
