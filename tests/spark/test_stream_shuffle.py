"""shuffle="stream" through a whole launch: steps while rows still arrive, whichever shard ends first."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import tritium as tr
from ranks import supervisor
from tritium.checkpoint.store import Store
from tritium.gang.driver.launch import start
from tritium.gang.settings import Gang

BATCH = 1024


def many(spark: Any, rows: int) -> Any:
    """Return rows of 1 KB: hundreds of MB, only a few in flight between Spark and a supervisor that is stopped."""
    from pyspark.sql import functions as F

    return spark.range(0, rows, 1, 4).select("id", F.array_repeat(F.col("id").cast("double"), 128).alias("x"))


def take(epochs: Any) -> tuple[np.ndarray, int, float]:
    """Return the ids of all batches, the steps, and the sum of the scales."""
    ids, steps, scale = [], 0, 0.0
    for epoch in epochs:
        for batch in epoch:
            if "x" in batch:
                assert (batch["x"] == batch["id"][:, None]).all()
            ids.append(np.array(batch["id"][: batch.rows]))
            steps, scale = steps + 1, scale + batch.scale
    return np.concatenate(ids), steps, scale


def test_the_first_step_is_taken_while_the_shuffle_is_still_being_read(spark: Any) -> None:
    rows = 300_000

    def train() -> tuple[list[int], bool, int, int]:
        """Take the first step. Return how far the rows of all ranks have come by then."""
        shard = tr.world().shard("train")
        epoch = next(shard.epochs(1, batch_size=BATCH))
        batches = iter(epoch)
        first = next(batches)
        mark = shard.feed.wait(0)
        ids = [np.array(first["id"])]
        ids += [np.array(batch["id"][: batch.rows]) for batch in batches]
        return np.concatenate(ids).tolist(), mark.complete, mark.rows, shard.rows

    results = tr.launch(train, ranks=2, data={"train": tr.Data(many(spark, rows), shuffle="stream")}, spark=spark)
    assert sorted(i for ids, *_ in results for i in ids) == list(range(rows))
    for ids, complete, seen, own in results:
        assert not complete, "every row was there when the first step was taken"
        assert BATCH <= seen < own == len(ids) == rows // 2
        assert ids != sorted(ids)


def test_a_save_waits_until_the_rows_it_rests_on_are_known_to_be_complete(spark: Any, tmp_path: Any) -> None:
    rows = 300_000

    def train() -> list[tuple[bool, bool]]:
        """Return whether the rows were complete before and after a save at the first step, and around a position."""
        world, found = tr.world(), []
        shard = world.shard("train")
        for epoch in shard.epochs(1, batch_size=BATCH):
            for batch in epoch:
                if batch.step == 0:
                    before = shard.feed.wait(0).complete
                    world.checkpoint.save({"step": 0}, 1, own=lambda: {"position": shard.state()})
                    found.append((before, shard.feed.wait(0).complete))
                    assert "fingerprint" in shard.state()
        return found

    data = {"train": tr.Data(many(spark, rows), shuffle="stream")}
    results = tr.launch(train, ranks=2, data=data, spark=spark, run_dir=str(tmp_path / "run"), progress=False)
    assert results == [[(False, True)]] * 2
    saved, _ = Store(str(tmp_path / "run")).newest()
    assert saved is not None
    assert all("fingerprint" in own["position"] for own in saved.own), "or a new start could not tell moved rows"


def test_a_shard_that_ends_early_neither_hangs_nor_shortens_the_others(spark: Any) -> None:
    """Rank 1 makes rank 0's supervisor stand still until its own rows have ended, and takes all that it may."""
    rows = 300_000

    def train() -> tuple[list[int], int, float, bool]:
        world = tr.world()
        shard = world.shard("train")
        other = world.gather(supervisor())[0]
        early = False
        if world.rank == 1:
            os.kill(other, signal.SIGSTOP)
            try:
                feed = shard.feed
                with feed._moved:  # there is no public way to wait for an end that is not everyone's
                    early = feed._moved.wait_for(lambda: feed._watermark and 1 in feed._watermark.ended, timeout=60)
                    early = early and 0 not in feed._watermark.ended
            finally:
                os.kill(other, signal.SIGCONT)
        ids, steps, scale = take(shard.epochs(1, batch_size=BATCH))
        return ids.tolist(), steps, scale, early

    results = tr.launch(train, ranks=2, data={"train": tr.Data(many(spark, rows), shuffle="stream")}, spark=spark)
    assert [early for *_, early in results] == [False, True], "rank 1's rows were to end before those of rank 0"
    assert sorted(i for ids, *_ in results for i in ids) == list(range(rows))
    assert [steps for _, steps, *_ in results] == [-(-rows // 2 // BATCH)] * 2


@pytest.mark.parametrize(("remainder", "steps"), [("pad", 15), ("drop", 12), ("repeat", 15)])
def test_skewed_shards_take_the_same_exact_number_of_steps(spark: Any, remainder: str, steps: int) -> None:
    """Partitions of a row each go to the ranks in turn: every second one empty, and rank 0 has 20 rows more."""
    from pyspark.sql import functions as F

    single = spark.range(0, 40, 1, 40).where(F.col("id") % 2 == 0)
    frame = single.union(spark.range(1000, 1200, 1, 1))

    def train(remainder: str) -> tuple[list[int], int, float, list[int]]:
        shard = tr.world().shard("train")
        ids, steps, scale = take(shard.epochs(1, batch_size=8, remainder=remainder))
        return ids.tolist(), steps, scale, shard.counts

    data = {"train": tr.Data(frame, shuffle="stream")}
    run = start(train, Gang(ranks=2), args=(remainder,), data=data, spark=spark)
    expected = [*range(0, 40, 2), *range(1000, 1200)]
    taken = [i for ids, *_ in run.result() for i in ids]
    assert [counts for *_, counts in run.result()] == [[120, 100]] * 2
    assert [found for _, found, *_ in run.result()] == [steps] * 2
    shards = [rank["shards"]["train"] for rank in run.report["ranks"]]
    if remainder == "pad":
        assert sorted(taken) == expected
        assert sum(scale for *_, scale, _ in run.result()) == pytest.approx(2 * steps)
        assert [shard["padded"] for shard in shards] == [0, 2]
    elif remainder == "drop":
        assert len(taken) == len(set(taken)) == 2 * steps * 8
        assert [shard["dropped"] for shard in shards] == [24, 4]
    else:
        assert sorted(set(taken)) == expected
        assert [shard["repeated"] for shard in shards] == [0, 20]
    assert [shard["rows"] for shard in shards] == [120, 100]
