"""Which rows of a data set a shard reads (any process)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritium_compat.petastorm.dataset import RowGroup, rows_of
from tritium_compat.petastorm.errors import NoDataAvailableError


@dataclass(frozen=True)
class Part:
    """Rows of one row group that a reader loads at once.

    stop : the row after the last one; None: all.
    repeats : how often the last row comes again, so that all shards have equally many.
    drop : (i, n): only the i-th of n equal parts of these rows (`shuffle_row_drop_partitions`).
    """

    group: RowGroup
    start: int = 0
    stop: int | None = None
    repeats: int = 0
    drop: tuple[int, int] = (0, 1)


def check(cur_shard: Any, shard_count: Any) -> bool:
    """Return whether a data set is sharded; ValueError where the two are not of one another."""
    if cur_shard is None and shard_count is None:
        return False
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (cur_shard, shard_count))
    if not whole or not 0 <= cur_shard < shard_count:
        raise ValueError(
            f"cur_shard={cur_shard!r}, shard_count={shard_count!r}: both are whole numbers, the first from 0 to below "
            "the second. Pass hvd.rank() and hvd.size()."
        )
    return True


def by_row_group(groups: Sequence[RowGroup], shard: int, shards: int) -> list[Part]:
    """Return every n-th row group, as Petastorm does: shards differ by whole row groups."""
    if len(groups) < shards:
        raise NoDataAvailableError(
            f"There are {len(groups)} row groups for {shards} shards, so some would be empty. Ask for fewer shards, or "
            "write more files: df.repartition(n)."
        )
    return [Part(group) for group in groups[shard::shards]]


def equal(groups: Sequence[RowGroup], shard: int, shards: int) -> list[Part]:
    """Return every n-th row group, cut so that all shards have equally many rows.

    A shard with too many rows gives its last ones to those with too few. Where the rows can't be divided, some shards
    read one of their rows twice. Every shard computes the same from the row counts of all row groups.
    """
    total = rows_of(groups)
    if not total:
        raise NoDataAvailableError(f"There are no rows for {shards} shards.")
    each, more = divmod(total, shards)
    wanted = [each + (number < more) for number in range(shards)]
    own: list[list[Part]] = [[] for _ in range(shards)]
    spare: list[Part] = []
    for number in range(shards):
        missing = wanted[number]
        for group in groups[number::shards]:
            taken = min(missing, group.rows or 0)
            _add(own[number], group, 0, taken)
            _add(spare, group, taken, group.rows or 0)
            missing -= taken
        wanted[number] = missing
    for number in range(shards):
        while wanted[number]:
            part = spare.pop()
            start, stop = part.start, part.stop or 0
            taken = min(wanted[number], stop - start)
            _add(own[number], part.group, start, start + taken)
            _add(spare, part.group, start + taken, stop)
            wanted[number] -= taken
    if not more or shard < more:
        return own[shard]
    if not own[shard]:
        return [Part(next(group for group in groups if group.rows), 0, 1)]
    last = own[shard][-1]
    return [*own[shard][:-1], Part(last.group, last.start, last.stop, repeats=1)]


def _add(parts: list[Part], group: RowGroup, start: int, stop: int) -> None:
    if stop > start:
        parts.append(Part(group, start, stop))
