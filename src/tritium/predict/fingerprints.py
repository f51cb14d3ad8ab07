"""Fingerprints of a DataFrame's rows, computed in the JVM, and which parts of a source they are of (driver).

A fingerprint is the number of rows, and the sums of the lower and the upper half of a 64-bit hash of each row. It does
not depend on the order of the rows, and that of several partitions is the sum of theirs. It detects accidental changes,
not deliberate ones.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tritium.predict.ledger import Part

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Print = tuple[int, int, int]
_HASH = "_tritium_hash"
_NAMES = ("rows", "low", "high")


def observed(df: DataFrame) -> tuple[DataFrame, Any]:
    """Return `df`, and an Observation that has the fingerprint of its rows once they were computed: see `print_of`."""
    from pyspark.sql import Observation

    observation = Observation()
    hashed = df.withColumn(_HASH, _hash(df))
    return hashed.observe(observation, *_sums()).drop(_HASH), observation


def print_of(observation: Any) -> Print:
    """Return the fingerprint that was observed."""
    return _print(observation.get)


def print_of_rows(df: DataFrame, columns: Sequence[str]) -> Print:
    """Compute the fingerprint of these columns of a DataFrame."""
    chosen = df.select(*map(quoted, columns))
    return _print(chosen.select(_hash(chosen).alias(_HASH)).agg(*_sums()).collect()[0].asDict())


def prints_of(df: DataFrame, partitions: int) -> list[Print]:
    """Compute the fingerprint of each partition of a DataFrame that has so many."""
    from pyspark.sql import functions as F

    by_partition = df.select(F.spark_partition_id().alias("_tritium_partition"), _hash(df).alias(_HASH))
    rows = by_partition.groupBy("_tritium_partition").agg(*_sums()).collect()
    prints = {row["_tritium_partition"]: _print(row.asDict()) for row in rows}
    return [prints.get(partition, (0, 0, 0)) for partition in range(partitions)]


def total(prints: Iterable[Print]) -> Print:
    """Return the fingerprint of several partitions together."""
    rows, low, high = (sum(column) for column in zip((0, 0, 0), *prints, strict=True))
    return rows, low, high


def located(parts: Sequence[Part], prints: Sequence[Print]) -> tuple[list[Part], list[Part], list[int]]:
    """Return the finished parts whose rows are in the source, those whose are not, and the source partitions left.

    A part is where consecutive partitions have its fingerprint: at its place, or elsewhere if others came before it.
    The `first` of each is set to where it is.
    """
    ends = [(0, 0, 0), *itertools.accumulate(prints, lambda one, other: total([one, other]))]
    places: dict[int, dict[Print, list[int]]] = {}
    for count in {part.count for part in parts}:
        windows = places[count] = defaultdict(list)
        for first in range(len(prints) - count + 1):
            before, after = ends[first], ends[first + count]
            windows[after[0] - before[0], after[1] - before[1], after[2] - before[2]].append(first)
    free = [True] * len(prints)
    kept: list[Part] = []
    changed: list[Part] = []
    for part in sorted(parts, key=lambda part: not _is_at(part, part.first, places)):
        assert part.fingerprint is not None
        candidates = sorted(places[part.count].get(part.fingerprint, []), key=lambda first: first != part.first)
        free_places = [first for first in candidates if all(free[first : first + part.count])]
        if not free_places:
            changed.append(part)
            continue
        part.first = first = free_places[0]
        free[first : first + part.count] = [False] * part.count
        kept.append(part)
    return kept, changed, [partition for partition, is_free in enumerate(free) if is_free]


def _is_at(part: Part, first: int, places: dict[int, dict[Print, list[int]]]) -> bool:
    return part.fingerprint is not None and first in places[part.count].get(part.fingerprint, [])


def _hash(df: DataFrame) -> Column:
    """Return a 64-bit hash of a row. Spark hashes no maps and no variants, which are taken as JSON."""
    from pyspark.sql import functions as F

    columns = [F.col(quoted(field.name)) for field in df.schema.fields]
    return F.xxhash64(
        *(
            F.to_json(F.struct(column), {"ignoreNullFields": "false"}) if _is_unhashable(field.dataType) else column
            for field, column in zip(df.schema.fields, columns, strict=True)
        )
    )


def _is_unhashable(kind: Any) -> bool:
    return any(name in kind.simpleString() for name in ("map<", "variant"))


def quoted(name: str) -> str:
    """Return the name of a column as Spark's functions take it, whatever characters it has."""
    return f"`{name.replace('`', '``')}`"


def _sums() -> list[Column]:
    from pyspark.sql import functions as F

    # Halves of the hash: the sum of 64-bit numbers would overflow, which Spark takes for an error.
    low = F.sum(F.col(_HASH).bitwiseAND(F.lit(0xFFFFFFFF)))
    high = F.sum(F.shiftrightunsigned(_HASH, 32))
    return [one.alias(name) for one, name in zip((F.count(F.lit(1)), low, high), _NAMES, strict=True)]


def _print(values: dict[str, Any]) -> Print:
    rows, low, high = (int(values[name] or 0) for name in _NAMES)
    return rows, low, high
