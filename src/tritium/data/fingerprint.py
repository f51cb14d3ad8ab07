"""A fingerprint of a shard's contents that does not depend on the order of delivery (any process).

Per source partition it is the number of rows and the sum, modulo 2**64, of a hash of (id, row). Two evaluations of a
source that gave every id the same row have the same fingerprint; a row that changed, moved or is missing shows. It
guards against accidents, not against an adversary.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tritium.data.spool import Ragged

Array = np.ndarray[Any, Any]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Fingerprint:
    """Adds up over segments; `parts` is source partition → (rows, sum of hashes)."""

    def __init__(self) -> None:
        self.parts: dict[int, tuple[int, int]] = {}
        self._keys: dict[tuple[str, int], Array] = {}

    def add(self, ids: Array, columns: Mapping[str, Array | Ragged]) -> None:
        """Add the rows with these `ids` (int64 `[rows]`); every column is `[rows, ...]` or Ragged."""
        if not len(ids):
            return
        hashes = ids.view(np.uint64) * _GOLDEN
        for name, column in columns.items():
            hashes += self._ragged(name, column) if isinstance(column, Ragged) else self._fixed(name, column)
        hashes = _mixed(hashes)
        partitions = ids >> 33
        starts = np.flatnonzero(np.diff(partitions, prepend=partitions[0] - 1))
        sums = np.add.reduceat(hashes, starts)
        counts = np.diff(starts, append=len(ids))
        for partition, count, total in zip(partitions[starts].tolist(), counts.tolist(), sums.tolist(), strict=True):
            rows, before = self.parts.get(partition, (0, 0))
            self.parts[partition] = (rows + count, (before + total) & 0xFFFFFFFFFFFFFFFF)

    def _fixed(self, name: str, column: Array) -> Array:
        """One uint64 per row: the row's words times keys, added up. Its cost is two passes over the column."""
        rows = np.ascontiguousarray(column).reshape(len(column), -1)
        size = rows.shape[1] * rows.itemsize
        if not size:
            return np.zeros(len(rows), np.uint64)
        width = next(width for width in (8, 4, 2, 1) if size % width == 0)
        words = rows.view(f"u{width}")
        if width == 8:  # times an odd key, two flipped top bits would cancel: bring them down first
            folded = words >> np.uint64(29)
            folded ^= words
        else:
            folded = words.astype(np.uint64)
        hashes: Array = np.einsum("ij,j->i", folded, self._key(name, folded.shape[1]))
        return hashes

    def _ragged(self, name: str, column: Ragged) -> Array:
        ends = np.cumsum(column.lengths)
        data = np.ascontiguousarray(column.values).view(np.uint8).data
        size = column.values.itemsize
        sums = [
            zlib.crc32(data[(end - length) * size : end * size])
            for end, length in zip(ends.tolist(), column.lengths.tolist(), strict=True)
        ]
        keys = self._key(name, 2)
        hashes: Array = np.array(sums, np.uint64) * keys[0] + column.lengths.astype(np.uint64) * keys[1]
        return hashes

    def _key(self, name: str, count: int) -> Array:
        """`count` odd numbers that belong to a column's name."""
        found = self._keys.get((name, count))
        if found is None:
            seed = np.uint64(zlib.crc32(name.encode()) << 32)
            found = _mixed(seed + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
            self._keys[name, count] = found
        return found


def _mixed(values: Array) -> Array:
    """`values` themselves, every bit of each spread over all 64 (splitmix64's finish)."""
    shifted = values >> np.uint64(30)
    values ^= shifted
    values *= _MIX_1
    values ^= np.right_shift(values, np.uint64(27), out=shifted)
    values *= _MIX_2
    values ^= np.right_shift(values, np.uint64(31), out=shifted)
    return values
