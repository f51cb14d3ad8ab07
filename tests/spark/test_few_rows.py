"""Few rows in many source partitions: every rank gets its part, and the position of a resumed epoch stays exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyspark.sql import functions as F

import tritium as tr
from tritium.data.few import MOST_ROWS
from tritium.errors import BadRow, EmptyShard

QUIET: dict[str, Any] = {"progress": False, "output": "none", "retries": 0}


def spread(spark: Any, rows: int, partitions: int) -> Any:
    """Return rows that an even rank would all get: row i is the only one of source partition 2 i."""
    places = spark.range(0, partitions, 1, partitions).where((F.col("id") % 2 == 0) & (F.col("id") < 2 * rows))
    return places.select((F.col("id") / 2).cast("long").alias("k"))


def taken() -> tuple[list[int], list[int]]:
    """Return this rank's rows in the order of an epoch, and the counts of all ranks."""
    shard = tr.world().shard("train")
    batches = (batch for epoch in shard.epochs(1, batch_size=2, shuffle=False) for batch in epoch if batch.scale)
    return [int(k) for batch in batches for k in batch["k"]], shard.counts


def test_five_rows_of_two_hundred_partitions_are_dealt_evenly(spark: Any) -> None:
    (one, counts), (other, _) = tr.launch(taken, ranks=2, data={"train": spread(spark, 5, 200)}, spark=spark, **QUIET)
    assert (one, other) == ([0, 2, 4], [1, 3])
    assert counts == [3, 2]


def test_several_names_of_which_one_has_fewer_rows_than_ranks(spark: Any) -> None:
    def both() -> tuple[list[int], list[int]]:
        world = tr.world()
        return world.shard("train").counts, world.shard("validation").counts

    data = {"train": spread(spark, 6, 40), "validation": spread(spark, 1, 3)}
    (found, again) = tr.launch(both, ranks=2, data=data, spark=spark, **QUIET)
    assert found == again
    assert found[0] == [3, 3]
    assert sorted(found[1]) == [0, 1]
    with pytest.raises(EmptyShard):
        tr.launch(taken, ranks=2, data={"train": spread(spark, 1, 9)}, spark=spark, **QUIET)


def test_one_size_more_is_left_as_the_jvm_deals_it(spark: Any) -> None:
    frame = spark.range(0, MOST_ROWS + 1, 1, 3).withColumnRenamed("id", "k")

    def sums() -> tuple[int, int]:
        shard = tr.world().shard("train")
        return int(sum(b["k"].sum() for e in shard.epochs(1, batch_size=999) for b in e)), len(shard.counts)

    found = tr.launch(sums, ranks=2, data={"train": frame}, spark=spark, **QUIET)
    assert sum(one for one, _ in found) == np.arange(MOST_ROWS + 1).sum()


def test_an_epoch_of_few_rows_goes_on_at_another_world_size(spark: Any) -> None:
    def begin() -> tuple[list[int], Any]:
        shard = tr.world().shard("train")
        for epoch in shard.epochs(1, batch_size=2, seed=3):
            return [int(k) for k in next(iter(epoch))["k"]], shard.state()
        raise AssertionError

    def rest(states: Any) -> list[int]:
        epochs = tr.world().shard("train").epochs(1, batch_size=2, seed=3, resume=states)
        return [int(k) for epoch in epochs for batch in epoch if batch.scale for k in batch["k"]]

    data = {"train": spread(spark, 11, 60)}
    begun = tr.launch(begin, ranks=2, data=data, spark=spark, **QUIET)
    (left,) = tr.launch(rest, ranks=1, args=([state for _, state in begun],), data=data, spark=spark, **QUIET)
    assert sorted(left + [k for rows, _ in begun for k in rows]) == list(range(11))


def test_a_bad_row_is_named_by_its_place_in_the_source(spark: Any) -> None:
    frame = spread(spark, 4, 9).withColumn("x", F.when(F.col("k") != 3, F.col("k")))
    with pytest.raises(BadRow, match="row 0 of source partition 6"):
        tr.launch(taken, ranks=2, data={"train": frame}, spark=spark, **QUIET)
