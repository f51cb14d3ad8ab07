"""A fingerprint of a shard's contents that does not depend on the order of delivery (any process).

Per source partition it is the number of rows and two sums modulo 2**64: of a hash of (id, row), and of a hash of the
row alone. Two evaluations of a source that gave every id the same row have the same fingerprint; one in which a row
changed, moved or is missing has another. Where only the total of the second sums is the same, the same rows have other
ids. It detects accidental changes, not deliberate ones.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tritium.data.idset import PARTITION_BITS
from tritium.data.spool import Ragged

Array = np.ndarray[Any, Any]
Part = tuple[int, int, int]
Table = list[list[Any]]
"""A whole fingerprint as JSON: partition, rows, and the two sums in hexadecimal, by partition."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_WORD = 0xFFFFFFFFFFFFFFFF
_MIX_2 = np.uint64(0x94D049BB133111EB)


REDRAWN = (
    " Where a validation fraction was drawn from rows that Spark orders otherwise each time (after a join, an "
    "aggregation or a repartition), it is another one now: row_key= keeps it."
)
"""A sentence that is added to the error for rows that are not those of a checkpoint."""


class Fingerprint:
    """The sums over a shard's segments.

    parts : source partition → (rows, sum over (id, row), sum over the row).
    """

    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self._keys: dict[tuple[str, int], Array] = {}

    def add(self, ids: Array, columns: Mapping[str, Array | Ragged]) -> None:
        """Add the rows with these `ids`, int64 `[rows]`; every column is `[rows, ...]` or Ragged."""
        if not len(ids):
            return
        rows = np.zeros(len(ids), np.uint64)
        for name, column in columns.items():
            rows += self._ragged(name, column) if isinstance(column, Ragged) else self._fixed(name, column)
        hashes = mixed(ids.view(np.uint64) * _GOLDEN + rows)
        contents = mixed(rows)
        partitions = ids >> PARTITION_BITS
        starts = np.flatnonzero(np.diff(partitions, prepend=partitions[0] - 1))
        sums = (np.add.reduceat(terms, starts).tolist() for terms in (hashes, contents))
        counts = np.diff(starts, append=len(ids)).tolist()
        for partition, *part in zip(partitions[starts].tolist(), counts, *sums, strict=True):
            self.parts[partition] = added(self.parts.get(partition, (0, 0, 0)), part)

    def _fixed(self, name: str, column: Array) -> Array:
        """Return uint64 [rows]: the sum of a row's words times keys. Takes one pass over the column."""
        if column.ndim > 2 or column.strides[-1] != column.itemsize:
            column = np.ascontiguousarray(column)
        rows = column.reshape(len(column), -1)
        size = rows.shape[1] * rows.itemsize
        if not size:
            return np.zeros(len(rows), np.uint64)
        # Words have less than 64 bits, as two flipped top bits of 64 would cancel each other times an odd key.
        words = rows.view(f"u{next(width for width in (4, 2, 1) if size % width == 0)}")
        hashes: Array = np.einsum("ij,j->i", words, self._key(name, words.shape[1]), dtype=np.uint64)
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
        """Return `count` odd numbers derived from a column's name."""
        key = self._keys.get((name, count))
        if key is None:
            seed = np.uint64(zlib.crc32(name.encode()) << 32)
            key = mixed(seed + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
            self._keys[name, count] = key
        return key


def added(one: Sequence[int], other: Sequence[int]) -> Part:
    """Return the sum of two parts of one partition."""
    return one[0] + other[0], (one[1] + other[1]) & _WORD, (one[2] + other[2]) & _WORD


def table(parts: Mapping[int, Sequence[int]]) -> Table:
    """Return a fingerprint as JSON."""
    return [[partition, rows, f"{h:016x}", f"{c:016x}"] for partition, (rows, h, c) in sorted(parts.items())]


def summary(whole: Table) -> dict[str, Any]:
    """Return a fingerprint in three values, JSON: `digest` of all of it, `rows`, and `content` of rows without ids."""
    content = sum(int(part[3], 16) for part in whole) & _WORD
    digest = hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:32]
    return {"digest": digest, "rows": sum(part[1] for part in whole), "content": f"{content:016x}"}


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Literal["same", "moved", "changed"]:
    """Return "same" where every id means the same row, "moved" where the same rows have other ids, else "changed"."""
    if before["digest"] == now["digest"]:
        return "same"
    return "moved" if (before["rows"], before["content"]) == (now["rows"], now["content"]) else "changed"


def differences(before: Table, now: Table, most: int = 8) -> str:
    """Return a clause that lists the changed source partitions, up to `most`: "partition 3: 100 rows, were 90"."""
    old, new = ({part[0]: part[1:] for part in one} for one in (before, now))
    changed = [p for p in sorted({*old, *new}) if old.get(p) != new.get(p)]
    words = []
    for p in changed[:most]:
        was, has = old.get(p, [0])[0], new.get(p, [0])[0]
        words.append(f"partition {p}: {has} rows, were {was}" if was != has else f"partition {p}: {has} rows, others")
    more = f", and {len(changed) - most} more" if len(changed) > most else ""
    return f"{len(changed)} of {len({*old, *new})} source partitions differ ({'; '.join(words)}{more})"


def mixed(values: Array) -> Array:
    """Spread every bit of each of `values` over all 64, in place (splitmix64's finalizer). Returns `values`."""
    shifted = values >> np.uint64(30)
    values ^= shifted
    values *= _MIX_1
    values ^= np.right_shift(values, np.uint64(27), out=shifted)
    values *= _MIX_2
    values ^= np.right_shift(values, np.uint64(31), out=shifted)
    return values
