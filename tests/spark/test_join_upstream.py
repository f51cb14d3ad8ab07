"""A join, groupBy, repartition or orderBy before the exchange: every row once, and a fingerprint that shows changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tritium as tr
from tritium.gang.driver.launch import start
from tritium.gang.driver.run import Run
from tritium.gang.settings import Gang

ROWS = 20_000


def joined(spark: Any) -> Any:
    from pyspark.sql import functions as F

    left = spark.range(0, ROWS, 1, 3).select(F.col("id").alias("k"), (F.col("id") % 997).alias("key"))
    right = spark.range(0, 997, 1, 2).select(F.col("id").alias("key"), (F.col("id") * 3).alias("v"))
    return left.join(right.hint("shuffle_hash"), "key").select("k", "v")


def grouped(spark: Any) -> Any:
    from pyspark.sql import functions as F

    twice = spark.range(0, 2 * ROWS, 1, 3).select((F.col("id") % ROWS).alias("k"), F.lit(1).alias("one"))
    return twice.groupBy("k").agg(((F.col("k") % 997) * 3 * F.sum("one") / 2).cast("long").alias("v"))


def plain(spark: Any) -> Any:
    from pyspark.sql import functions as F

    return spark.range(0, ROWS, 1, 5).select(F.col("id").alias("k"), (F.col("id") % 997 * 3).alias("v"))


SOURCES: dict[str, Callable[[Any], Any]] = {
    "join": joined,
    "groupBy": grouped,
    "repartition": lambda spark: plain(spark).repartition(6),
    "repartition by a column": lambda spark: plain(spark).repartition(6, "v"),
    "orderBy": lambda spark: plain(spark).orderBy("v", "k"),
}


def take() -> dict[str, np.ndarray]:
    """Return all rows of this rank in an epoch, with their ids."""
    shard = tr.world().shard("train")
    (epoch,) = shard.epochs(1, batch_size=512)
    batches = [{name: np.array(batch[name][: batch.rows]) for name in batch} for batch in epoch]
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in ("k", "v")}
    return {**rows, "id": np.array(shard.reader.ids), "k of id": np.array(shard.reader.column("k"))}


def train(frame: Any, spark: Any) -> Run:
    return start(take, Gang(ranks=2), data={"train": frame}, spark=spark)


def fingerprint(run: Run) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = run.report["fingerprint"]["train"]
    return found


def by_id(run: Run) -> dict[int, int]:
    pairs = [zip(rank["id"].tolist(), rank["k of id"].tolist(), strict=True) for rank in run.result()]
    return {row: k for rank in pairs for row, k in rank}


@pytest.mark.parametrize("source", SOURCES)
def test_every_row_comes_once_and_the_fingerprint_tells_whether_rows_moved(spark: Any, source: str) -> None:
    frame = SOURCES[source](spark)
    runs = [train(frame, spark), train(frame, spark)]
    for run in runs:
        k, v = (np.concatenate([rank[name] for rank in run.result()]) for name in ("k", "v"))
        assert sorted(k.tolist()) == list(range(ROWS))
        assert (v == k % 997 * 3).all()
        assert sum(count for count, _ in fingerprint(run).values()) == ROWS
    assert (by_id(runs[0]) == by_id(runs[1])) == (fingerprint(runs[0]) == fingerprint(runs[1]))


def test_where_ids_are_stable_the_fingerprints_of_two_launches_are_equal(spark: Any) -> None:
    runs = [train(plain(spark), spark), train(plain(spark), spark)]
    assert by_id(runs[0]) == by_id(runs[1])
    assert fingerprint(runs[0]) == fingerprint(runs[1])
    assert {part: count for part, (count, _) in fingerprint(runs[0]).items()} == {str(p): ROWS // 5 for p in range(5)}


def test_the_fingerprint_shows_that_the_same_ids_mean_other_rows(spark: Any, tmp_path: Path) -> None:
    """A source whose second evaluation gives the rows of one partition in another order: the same rows and ids."""
    turned = tmp_path / "turned"

    def turn(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        for batch in batches:
            other = turned.exists() and context is not None and context.partitionId() == 2
            yield batch.take(list(reversed(range(batch.num_rows)))) if other else batch

    frame = plain(spark).mapInArrow(turn, "k long, v long")
    before = train(frame, spark)
    again = train(frame, spark)
    turned.touch()
    after = train(frame, spark)
    assert fingerprint(before) == fingerprint(again)
    assert by_id(before).keys() == by_id(after).keys()
    assert sorted(by_id(before).values()) == sorted(by_id(after).values())
    changed = [part for part in fingerprint(before) if fingerprint(before)[part] != fingerprint(after)[part]]
    assert changed == ["2"]
    assert [count for count, _ in fingerprint(after).values()] == [count for count, _ in fingerprint(before).values()]
