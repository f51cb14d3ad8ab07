"""Learns the vocabularies of string columns from the rows to train on (driver)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tritium.data.tables import column_of
from tritium.data.types import columns_of, is_spark, spark_column
from tritium.errors import BadData
from tritium.ml.settings import S

MOST = 1_000_000
"""Words of one column that can be learnt; more are hashed, or the most frequent ones taken."""


def with_words(frame: Any, settings: S) -> S:
    """Return the settings with the words of every vocabulary, of which those to learn are counted in `frame`.

    Words are in the order of their frequency, equally frequent ones in that of the alphabet. The word that takes the
    place of a null is among them. Raises BadData for a column of which too many are to be learnt, or that has none.
    """
    words = settings.words()
    learn = {column: MOST + 1 if most == "learn" else most for column, most in words.items() if not _given(most)}
    if not learn:
        return settings
    counted = _of_spark(frame, learn) if is_spark(frame) else _of_table(frame, learn)
    learnt = {column: _checked(column, counted[column], words[column], settings) for column in learn}
    return dataclasses.replace(settings, vocabulary={**words, **learnt})


def _given(words: Any) -> bool:
    return not isinstance(words, str | int)


def _checked(column: str, counted: list[str], asked: Any, settings: S) -> tuple[str, ...]:
    if asked == "learn" and len(counted) > MOST:
        raise BadData(
            f"column {column!r} has more than {MOST:,} different words to learn. Take the most frequent ones, "
            f"vocabulary={{{column!r}: 100_000}} with unknown_words='keep', or hash them: hash_buckets={{{column!r}: "
            "1000}.",
            column=column,
        )
    fill = (settings.nulls or {}).get(column)
    if isinstance(fill, str) and fill not in counted:
        counted = [*counted, fill]
    if not counted:
        raise BadData(
            f"column {column!r} has no words to learn: it holds only nulls, or there are no rows.", column=column
        )
    return tuple(counted)


def _of_spark(frame: Any, most: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the most frequent words of each column, by one job over all of them."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    known, every = columns_of(frame.schema), []
    for number, column in enumerate(most):
        value = spark_column(frame.schema, column)
        every.append(_numbered(number, value if known[column].leaf()[1] else F.array(value)))
    pairs = frame.select(F.explode(F.concat(*(F.coalesce(pairs, F.array()) for pairs in every))).alias("pair"))
    counts = pairs.where("pair.w is not null").groupBy("pair.c", "pair.w").count()
    order = Window.partitionBy("c").orderBy(F.desc("count"), "w")
    limits = F.element_at(F.array(*(F.lit(limit) for limit in most.values())), F.col("c") + 1)
    rows = counts.withColumn("place", F.row_number().over(order)).where(F.col("place") <= limits)
    words: dict[str, list[str]] = {column: [] for column in most}
    names = list(most)
    for row in rows.orderBy("c", "place").collect():
        words[names[row["c"]]].append(row["w"])
    return words


def _numbered(number: int, words: Any) -> Any:
    """Return an array of pairs of this number and a word.

    The lambda has one argument, and no default: to a second one, F.transform gives the index in the array.
    """
    from pyspark.sql import functions as F

    return F.transform(words, lambda word: F.struct(F.lit(number).alias("c"), word.alias("w")))


def _of_table(table: pa.Table, most: Mapping[str, int]) -> dict[str, list[str]]:
    words = {}
    for column, limit in most.items():
        values = column_of(table, column)
        while pa.types.is_nested(values.type):
            values = values.flatten()
        counts = Counter(word for word in values.to_pylist() if word is not None)
        words[column] = [word for word, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:limit]]
    return words
