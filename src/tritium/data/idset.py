"""Sets of row ids as text, small enough for a checkpoint (any process)."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PARTITION_BITS = 33
"""An id is `source partition << 33 | position` (Spark's `monotonically_increasing_id`)."""
POSITION = (1 << PARTITION_BITS) - 1
"""The bits of an id that are its position."""
HALF = 1 << (PARTITION_BITS - 1)
"""The bit of a position that is set where rows of two names come from one frame, in the rows of the second name."""


def place(number: int) -> str:
    """Return the place of the row with this id, for messages."""
    return f"row {number & (HALF - 1)} of source partition {number >> PARTITION_BITS}"


def rank_of(ids: Array, ranks: int) -> Array:
    """Return the rank of each id, int64 [k], as the exchange distributes rows to `ranks`."""
    owner: Array = ((ids >> PARTITION_BITS) + (ids & POSITION)) % ranks
    return owner


class IdSet:
    """A set of ids of a shard: for each source partition the first id, the stride, and one bit per step of it.

    A shard's rows of a partition are a constant stride apart, so that a whole shard takes a few compressed bytes per
    partition, and any part of it at most one bit per row.
    """

    def __init__(self, first: Array, stride: Array, length: Array, bits: Array) -> None:
        self._first, self._stride, self._length, self._bits = first, stride, length, bits
        self._offset = np.cumsum(-(-length // 8) * 8) - (-(-length // 8) * 8)

    @classmethod
    def of(cls, ids: Array) -> IdSet:
        """Return the set of `ids` int64 [k], in any order."""
        ids = np.sort(ids)
        parts = np.split(ids, np.flatnonzero(np.diff(ids >> PARTITION_BITS)) + 1) if len(ids) else []
        first = np.array([part[0] for part in parts], np.int64)
        stride = np.array([max(1, int(np.gcd.reduce(np.diff(part)))) for part in parts], np.int64)
        length = np.array([(part[-1] - part[0]) // s + 1 for part, s in zip(parts, stride, strict=True)], np.int64)
        packed = cls(first, stride, length, np.zeros(int((-(-length // 8) * 8).sum()), bool))
        for number, part in enumerate(parts):
            packed._bits[packed._offset[number] + (part - first[number]) // stride[number]] = True
        return packed

    def ids(self) -> Array:
        """Return the ids, int64 [k], ascending."""
        positions = np.flatnonzero(self._bits)
        part = np.searchsorted(self._offset, positions, side="right") - 1
        ids: Array = self._first[part] + (positions - self._offset[part]) * self._stride[part]
        return ids

    def has(self, ids: Array) -> Array:
        """Return which of `ids` [k] are in the set, bool [k]."""
        if not len(self._first):
            return np.zeros(len(ids), bool)
        part = np.maximum(np.searchsorted(self._first, ids, side="right") - 1, 0)
        ahead = ids - self._first[part]
        step = ahead // self._stride[part]
        inside = (ahead >= 0) & (step * self._stride[part] == ahead) & (step < self._length[part])
        inside[inside] = self._bits[(self._offset[part] + step)[inside]]
        is_member: Array = inside
        return is_member

    def pack(self) -> str:
        """Return the set as text (base64)."""
        head = np.concatenate([[len(self._first)], self._first, self._stride, self._length]).astype("<i8")
        return base64.b64encode(zlib.compress(head.tobytes() + np.packbits(self._bits).tobytes())).decode()

    @classmethod
    def unpack(cls, text: str) -> IdSet:
        """Return the set that `pack()` wrote."""
        content = zlib.decompress(base64.b64decode(text))
        count = int(np.frombuffer(content, "<i8", 1)[0])
        first, stride, length = np.frombuffer(content, "<i8", 3 * count, 8).reshape(3, count).astype(np.int64)
        bits = np.unpackbits(np.frombuffer(content, np.uint8, offset=8 + 24 * count)).astype(bool)
        return cls(first, stride, length, bits)


def in_any(sets: Iterable[IdSet], ids: Array) -> Array:
    """Return which of `ids` [k] are in one of the sets, bool [k]."""
    is_member = np.zeros(len(ids), bool)
    for one in sets:
        is_member |= one.has(ids)
    return is_member
