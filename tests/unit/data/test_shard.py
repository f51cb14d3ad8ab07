"""Epochs over real spools: equal steps, exact coverage, resume, scale, streaming; ranks are Shards of one process."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritium.data.schema import Field
from tritium.data.shard import Shard
from tritium.data.spool import Ragged, Spool
from tritium.data.steps import Feed, WatermarkTracker
from tritium.errors import BadRow, BadSetting, DataError, EmptyShard

FIELDS = (
    Field(name="row", sources=("row",), kind="fixed", dtype="int64", shape=()),
    Field(name="x", sources=("a", "b"), kind="fixed", dtype="float32", shape=(2,)),
)
ROW = 16  # bytes
FOREVER = 1 << 60


def values(ids: np.ndarray) -> np.ndarray:
    return (ids % 1009).astype("f8")


class Gang:
    """N shards over real spools, each with its own Feed, all fed by one WatermarkTracker. `deliver` replaces Spark."""

    def __init__(self, size: int, prepared: Any = "full", window: int = 4, memory: int | None = None) -> None:
        self.size = size
        self.tracker = WatermarkTracker(size)
        self.spools = [Spool(FIELDS) for _ in range(size)]
        self.feeds = [Feed() for _ in range(size)]
        self.notes: list[list[dict[str, Any]]] = [[] for _ in range(size)]
        self.shards = [
            Shard(
                "train",
                self.spools[i].describe(),
                FIELDS,
                index=i,
                size=size,
                feed=self.feeds[i],
                prepared=prepared,
                on_epoch_end=self.notes[i].append,
                window=window,
                memory=memory,
            )
            for i in range(size)
        ]

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *error: object) -> None:
        for shard, spool in zip(self.shards, self.spools, strict=True):
            shard.close()
            spool.close()

    def deliver(self, rank: int, ids: np.ndarray, ended: bool = False) -> None:
        x = np.stack([values(ids), -values(ids)], axis=1).astype("f4").reshape(-1, 2)
        self.spools[rank].append(ids, {"row": ids, "x": x})
        self.tracker.report(rank, self.spools[rank].commit(), ended)
        mark = self.tracker.change()
        if mark is not None:
            for feed in self.feeds:
                feed.publish(mark)

    @classmethod
    def filled(
        cls, shards: list[np.ndarray], prepared: Any = "full", window: int = 4, memory: int | None = None
    ) -> Gang:
        gang = cls(len(shards), prepared, window, memory)
        for rank, ids in enumerate(shards):
            gang.deliver(rank, ids, ended=True)
        return gang


def deal(partitions: list[int], size: int) -> list[np.ndarray]:
    """Return the ids of each rank, sorted, as the exchange distributes rows of source partitions."""
    ids = [(p << 33) + np.arange(count) for p, count in enumerate(partitions)]
    ranks = [(np.arange(count) + p) % size for p, count in enumerate(partitions)]
    every, to = np.concatenate(ids), np.concatenate(ranks)
    return [every[to == rank] for rank in range(size)]


def steps_of(gang: Gang, **how: Any) -> list[list[list[Any]]]:
    """Return [epoch][step][rank] → Batch."""
    each = [[list(epoch) for epoch in shard.epochs(**how)] for shard in gang.shards]
    for rank, epochs in enumerate(each):
        assert [len(epoch) for epoch in epochs] == [len(epoch) for epoch in each[0]], f"rank {rank}"
    return [list(zip(*epoch, strict=True)) for epoch in zip(*each, strict=True)]  # type: ignore[arg-type]


def real_rows(batch: Any, rank_rows: int, batch_size: int, remainder: str) -> np.ndarray:
    """Return the ids in a batch that are neither repeated nor only keep the rank in step."""
    ids = batch["row"]
    if remainder == "pad":
        return ids[: batch.rows]
    if remainder == "repeat":
        return ids[: max(0, min(batch_size, rank_rows - batch.step * batch_size))]
    return ids


def check_epoch(shards: list[np.ndarray], epoch: list[list[Any]], batch_size: int, remainder: str) -> None:
    """Assert every row once, or as the policy says, and that the scale gives the exact mean of each step."""
    counts = [len(ids) for ids in shards]
    if remainder == "drop":
        assert len(epoch) == min(counts) // batch_size
    else:
        assert len(epoch) == math.ceil(max(counts) / batch_size)
    for rank, ids in enumerate(shards):
        batches = [step[rank] for step in epoch]
        taken = np.concatenate([real_rows(b, len(ids), batch_size, remainder) for b in batches])
        assert len(np.unique(taken)) == len(taken)
        assert np.isin(taken, ids).all()
        assert len(taken) == (len(epoch) * batch_size if remainder == "drop" else len(ids))
        for number, batch in enumerate(batches):
            assert batch.step == number
            assert np.isin(batch["row"], ids).all()
            assert np.array_equal(batch["x"][:, 0], values(batch["row"]).astype("f4"))
            if remainder != "pad":
                assert len(batch["row"]) == batch.rows == batch_size
            else:
                assert len(batch["row"]) == max(1, batch.rows)
        if remainder == "repeat":
            times = Counter(np.concatenate([b["row"] for b in batches]).tolist())
            assert max(times.values()) - min(times.values()) <= 1, "rows repeat evenly"
    for step in epoch:
        assert {batch.total for batch in step} == {sum(batch.rows for batch in step)}
        size = len(step)
        mean = sum(batch.scale * values(batch["row"]).mean() for batch in step) / size
        if remainder == "pad":
            exact = np.concatenate([values(b["row"][: b.rows]) for b in step]).mean()
        else:
            exact = np.concatenate([values(b["row"]) for b in step]).mean()
            assert {batch.scale for batch in step} == {1.0}
        assert mean == pytest.approx(exact, rel=1e-12)


def check_notes(gang: Gang, shards: list[np.ndarray], steps: int, batch_size: int, remainder: str) -> None:
    for rank, ids in enumerate(shards):
        note, count = gang.notes[rank][-1], len(ids)
        assert note["rows"] == count
        assert note["steps"] == steps
        assert note["used"] == (steps * batch_size if remainder == "drop" else count)
        assert note["dropped"] == count - note["used"]
        assert note["padded"] == (steps - math.ceil(count / batch_size) if remainder == "pad" else 0)
        assert note["repeated"] == (steps * batch_size - count if remainder == "repeat" else 0)
    assert gang.shards[0].report() == gang.notes[0]


partitions = st.lists(st.integers(0, 14), min_size=1, max_size=6)
remainders = st.sampled_from(["pad", "drop", "repeat"])
shuffles = st.sampled_from(["full", "stream", False])
memories = st.sampled_from([None, 0, 3 * ROW, 10 * ROW])


def may_run(shards: list[np.ndarray], batch_size: int, remainder: str) -> bool:
    least = min(len(ids) for ids in shards)
    return least > 0 and (remainder != "drop" or least >= batch_size)


@given(
    counts=partitions,
    size=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    remainder=remainders,
    shuffle=shuffles,
    n=st.integers(1, 3),
    seed=st.integers(0, 3),
    window=st.integers(1, 12),
    memory=memories,
    data=st.data(),
)
@settings(max_examples=200)
def test_every_row_once_in_equal_steps(
    counts: list[int],
    size: int,
    batch_size: int,
    remainder: str,
    shuffle: Any,
    n: int,
    seed: int,
    window: int,
    memory: int | None,
    data: st.DataObject,
) -> None:
    shards = deal(counts, size)
    arrived = [data.draw(arrival(ids)) for ids in shards] if shuffle == "stream" else shards
    how = {"n": n, "batch_size": batch_size, "shuffle": shuffle, "remainder": remainder, "seed": seed}
    with Gang.filled(arrived, "stream" if shuffle == "stream" else "full", window, memory) as gang:
        if not may_run(shards, batch_size, remainder):
            texts = set()
            for shard in gang.shards:
                with pytest.raises(EmptyShard) as caught:
                    [list(epoch) for epoch in shard.epochs(**how)]  # type: ignore[arg-type]
                texts.add(str(caught.value))
                assert caught.value.counts == [len(ids) for ids in shards]
            assert len(texts) == 1, "the same error on every rank"
            return
        epochs = steps_of(gang, **how)
        assert len(epochs) == n
        for number, epoch in enumerate(epochs):
            check_epoch(shards, epoch, batch_size, remainder)
            assert {batch.epoch for step in epoch for batch in step} == {number}
        check_notes(gang, shards, len(epochs[0]), batch_size, remainder)
        if shuffle is False:
            for rank, ids in enumerate(shards):
                rows = [real_rows(s[rank], len(ids), batch_size, remainder) for s in epochs[0]]
                taken = np.concatenate(rows)
                assert np.array_equal(taken, ids[: len(taken)])


def arrival(ids: np.ndarray) -> st.SearchStrategy[np.ndarray]:
    return st.permutations(range(len(ids))).map(lambda order: ids[np.array(order, np.int64)])


@given(counts=partitions, size=st.integers(1, 3), seed=st.integers(0, 3), data=st.data())
@settings(max_examples=50)
def test_the_order_of_arrival_makes_no_difference_to_a_full_shuffle(
    counts: list[int], size: int, seed: int, data: st.DataObject
) -> None:
    shards = deal(counts, size)
    if not may_run(shards, 3, "pad"):
        return
    orders = []
    for prepared in ("full", "stream", "stream"):
        arrived = shards if prepared == "full" else [data.draw(arrival(ids)) for ids in shards]
        with Gang.filled(arrived, prepared) as gang:
            epochs = steps_of(gang, n=2, batch_size=3, shuffle="full", seed=seed)
            orders.append([[b["row"].tolist() for b in step] for epoch in epochs for step in epoch])
    assert orders[0] == orders[1] == orders[2]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    with Gang.filled(deal([500], 1)) as gang:
        orders = []
        for seed in (0, 1):
            for epoch in steps_of(gang, n=3, batch_size=50, seed=seed):
                orders.append(np.concatenate([step[0]["row"] for step in epoch]))
        again = np.concatenate([step[0]["row"] for step in steps_of(gang, n=1, batch_size=50)[0]])
    assert np.array_equal(orders[0], again)
    for i, one in enumerate(orders):
        assert not np.array_equal(one, np.sort(one))
        assert not any(np.array_equal(one, other) for other in orders[:i])
    with Gang.filled([np.arange(100)] * 2) as gang:
        (epoch,) = steps_of(gang, n=1, batch_size=100)
        assert not np.array_equal(epoch[0][0]["row"], epoch[0][1]["row"]), "nor do two ranks share one"


@given(
    counts=partitions,
    size=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    remainder=remainders,
    shuffle=shuffles,
    stops=st.lists(st.integers(0, 25), min_size=1, max_size=2),
    window=st.integers(1, 12),
    memory=memories,
    data=st.data(),
)
@settings(max_examples=150)
def test_resuming_at_any_step_takes_exactly_the_rows_not_yet_seen(
    counts: list[int],
    size: int,
    batch_size: int,
    remainder: str,
    shuffle: Any,
    stops: list[int],
    window: int,
    memory: int | None,
    data: st.DataObject,
) -> None:
    """Interrupted at one or two steps of two epochs; before each resume the rows may arrive in another order."""
    shards = deal(counts, size)
    if not may_run(shards, batch_size, remainder):
        return
    prepared = "stream" if shuffle == "stream" else "full"
    how: dict[str, Any] = {"n": 2, "batch_size": batch_size, "shuffle": shuffle, "remainder": remainder}
    states: list[Any] = [None] * size
    batches: list[list[Any]] = [[] for _ in range(size)]
    whole: list[Any] = []
    for stop in [*stops, FOREVER]:
        arrived = [data.draw(arrival(ids)) for ids in shards] if shuffle == "stream" else shards
        with Gang.filled(arrived, prepared, window, memory) as gang:
            for rank, shard in enumerate(gang.shards):
                taken = 0
                for epoch in shard.epochs(**how, resume=states[rank]):
                    for batch in epoch:
                        batches[rank].append(batch)
                        taken += 1
                        if taken >= stop:
                            break
                    if taken >= stop:
                        break
                states[rank] = json.loads(json.dumps(shard.state()))
            if not whole:
                whole = steps_of(gang, **how)
    counts_of = [len(each) for each in batches]
    assert len(set(counts_of)) == 1, counts_of
    steps = len(whole[0])
    assert counts_of[0] == 2 * steps
    epochs = [[[batches[rank][e * steps + k] for rank in range(size)] for k in range(steps)] for e in range(2)]
    for number, epoch in enumerate(epochs):
        for rank, ids in enumerate(shards):
            rows = [real_rows(step[rank], len(ids), batch_size, remainder) for step in epoch]
            taken_rows = np.concatenate(rows)
            assert len(np.unique(taken_rows)) == len(taken_rows), "no row twice"
            assert len(taken_rows) == (steps * batch_size if remainder == "drop" else len(ids))
        for k, step in enumerate(epoch):
            assert [b.step for b in step] == [k] * size
            assert [b.scale for b in step] == [b.scale for b in whole[number][k]]
            if shuffle != "stream" or number:
                for one, other in zip(step, whole[number][k], strict=True):
                    assert np.array_equal(one["row"], other["row"])


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    batch_sizes=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    remainder=remainders,
    shuffle=shuffles,
    stops=st.lists(st.integers(0, 15), min_size=2, max_size=2),
    memory=memories,
    data=st.data(),
)
@settings(max_examples=200)
def test_a_gang_of_another_size_takes_exactly_the_rows_not_yet_seen(
    counts: list[int],
    sizes: list[int],
    batch_sizes: list[int],
    remainder: str,
    shuffle: Any,
    stops: list[int],
    memory: int | None,
    data: st.DataObject,
) -> None:
    """An epoch interrupted once or twice, each time continued by other ranks with other batches."""
    if any(not may_run(deal(counts, n), b, remainder) for n, b in zip(sizes, batch_sizes, strict=False)):
        return
    prepared = "stream" if shuffle == "stream" else "full"
    states: Any = None
    epochs: list[list[np.ndarray]] = [[], []]
    for size, batch_size, stop in zip(sizes, batch_sizes, [*stops[: len(sizes) - 1], FOREVER], strict=False):
        shards = deal(counts, size)
        arrived = [data.draw(arrival(ids)) for ids in shards] if shuffle == "stream" else shards
        how: dict[str, Any] = {"n": 2, "batch_size": batch_size, "shuffle": shuffle, "remainder": remainder}
        fresh, steps = [], []
        with Gang.filled(arrived, prepared, 4, memory) as gang:
            for rank, shard in enumerate(gang.shards):
                steps.append([])
                for epoch in shard.epochs(**how, resume=states):
                    for batch in epoch:
                        steps[rank].append(batch)
                        real = batch["row"] if remainder == "drop" else batch["row"][: batch.rows]
                        epochs[epoch.number].append(real)
                        if len(steps[rank]) >= stop:
                            break
                    if len(steps[rank]) >= stop:
                        break
                fresh.append(json.loads(json.dumps(shard.state())))
        states = fresh
        assert len({(state["epoch"], state["step"]) for state in states}) == 1
        for step in zip(*steps, strict=True):
            assert {b.total for b in step} == {sum(b.rows for b in step)}
    rows = sum(counts)
    for number, taken in enumerate(epochs):
        ids = np.concatenate(taken) if taken else np.empty(0, np.int64)
        if remainder == "repeat":
            assert len(np.unique(ids)) == rows
            continue
        assert len(np.unique(ids)) == len(ids), f"a row of epoch {number} was taken twice"
        assert remainder == "drop" or len(ids) == rows


def available(gang: Gang, step: int, batch_size: int, window: int, remainder: str) -> bool:
    """Return whether a rank may take the step, or end: by definition where every rank has the window or has ended.

    Under "drop" no step is left once an ended shard has none, but the report of the epoch waits for all counts.
    """
    mark = gang.tracker.watermark
    if remainder == "drop" and mark.ended and min(mark.ended.values()) // batch_size <= step:
        return mark.complete
    return mark.complete or mark.rows >= (step * batch_size // window + 1) * window


@given(
    counts=partitions,
    size=st.integers(1, 4),
    batch_size=st.integers(1, 4),
    remainder=remainders,
    blocks=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=150)
def test_streamed_steps_are_taken_while_rows_arrive(
    counts: list[int], size: int, batch_size: int, remainder: str, blocks: int, data: st.DataObject
) -> None:
    """Hypothesis interleaves deliveries and reads; a step that is due by the watermark never waits for more."""
    shards = deal(counts, size)
    if not may_run(shards, batch_size, remainder):
        return
    window = batch_size * blocks
    with Gang(size, "stream", window) as gang:
        left = [data.draw(arrival(ids)) for ids in shards]
        for rank in range(size):
            gang.deliver(rank, left[rank][:0])
        readers: list[Iterator[Any]] = []
        for shard in gang.shards:
            epoch = next(shard.epochs(1, batch_size=batch_size, shuffle="stream", remainder=remainder))  # type: ignore[arg-type]
            readers.append(iter(epoch))
        taken: list[list[Any]] = [[] for _ in range(size)]
        done = [False] * size

        def read_what_is_due(rank: int) -> None:
            while not done[rank] and available(gang, len(taken[rank]), batch_size, window, remainder):
                batch = next(readers[rank], None)
                if batch is None:
                    done[rank] = True
                    return
                taken[rank].append(batch)

        ended = [False] * size
        parts = st.tuples(st.integers(0, size - 1), st.integers(0, 9), st.booleans())
        last = [(rank, 99, True) for rank in data.draw(st.permutations(range(size)))]
        for rank, count, end in [*data.draw(st.lists(parts, max_size=12)), *last]:
            if ended[rank]:
                continue
            ended[rank] = end and count >= len(left[rank])
            gang.deliver(rank, left[rank][:count], ended[rank])
            left[rank] = left[rank][count:]
            for reader in data.draw(st.permutations(range(size))):
                read_what_is_due(reader)
        for rank in range(size):
            read_what_is_due(rank)
        assert all(done)
        assert len({len(each) for each in taken}) == 1
        check_epoch(shards, [list(step) for step in zip(*taken, strict=True)], batch_size, remainder)
        check_notes(gang, shards, len(taken[0]), batch_size, remainder)


def test_the_first_steps_are_taken_before_the_shards_are_complete() -> None:
    ids = deal([4000], 2)
    with Gang(2, "stream", window=100) as gang:
        for rank in (0, 1):
            gang.deliver(rank, ids[rank][:250])
        epochs = [next(shard.epochs(1, batch_size=50, shuffle="stream")) for shard in gang.shards]
        early = [[next(it)["row"] for _ in range(4)] for it in map(iter, epochs)]
        for rank in (0, 1):
            assert sorted(np.concatenate(early[rank])) == ids[rank][:200].tolist(), "two whole windows"
            gang.deliver(rank, ids[rank][250:], ended=True)
        rest = [[batch["row"] for batch in epoch] for epoch in epochs]
        for rank in (0, 1):
            assert np.array_equal(np.sort(np.concatenate(early[rank] + rest[rank])), ids[rank])
        assert epochs[0].steps == len(epochs[0]) == epochs[0].taken == 40


def test_a_shard_that_ends_early_neither_hangs_nor_shortens_the_others() -> None:
    """Threads for ranks: rank 0 has 30 rows, rank 1 gets 400 bit by bit after rank 0 has ended."""
    ids = np.arange(430)
    steps: list[int] = [0, 0]
    half = threading.Event()

    def train(rank: int, shard: Shard) -> None:
        for epoch in shard.epochs(1, batch_size=10, shuffle="stream"):
            for batch in epoch:
                steps[rank] += 1
                assert batch.rows == (10 if rank or steps[rank] <= 3 else 0)
                if steps == [20, 20]:
                    half.set()

    with Gang(2, "stream", window=20) as gang:
        threads = [threading.Thread(target=train, args=(r, s)) for r, s in enumerate(gang.shards)]
        for thread in threads:
            thread.start()
        gang.deliver(0, ids[:30], ended=True)
        for start in range(30, 230, 8):
            gang.deliver(1, ids[start : start + 8])
        assert half.wait(60), steps
        gang.deliver(1, ids[230:], ended=True)
        for thread in threads:
            thread.join(60)
        assert steps == [40, 40]


def test_an_empty_shard_among_streamed_ones_is_the_same_error_before_any_step() -> None:
    with Gang(3, "stream", window=4) as gang:
        gang.deliver(1, np.arange(50), ended=True)
        gang.deliver(0, np.arange(50, 90))
        gang.deliver(2, np.arange(0), ended=True)
        gang.deliver(0, np.arange(90, 100), ended=True)
        texts = set()
        for shard in gang.shards:
            with pytest.raises(EmptyShard) as caught:
                next(iter(next(shard.epochs(1, batch_size=4))))
            texts.add(str(caught.value))
    assert texts == {
        "rank 2 of 3 received no rows of 'train' (rows per rank: 50, 50, 0). Ask for fewer ranks, or check what the "
        "DataFrame holds."
    }


def test_a_large_shard_by_pieces() -> None:
    """More rows than one piece of anything: permutation pieces, windows, the ids of a state."""
    ids = np.concatenate([(p << 33) + np.arange(90_000) for p in (1, 0)])
    for shuffle in ("full", "stream"):
        with Gang.filled([ids], "stream", window=16_384) as gang:
            (shard,) = gang.shards
            seen, state = [], {}
            for batch in next(shard.epochs(1, batch_size=1000, shuffle=shuffle)):
                seen.append(batch["row"])
                if batch.step == 99:
                    state = shard.state()
                    break
            rest = [b["row"] for b in next(shard.epochs(1, batch_size=1000, shuffle=shuffle, resume=state))]
            assert len(json.dumps(state)) < 20_000
            assert np.array_equal(np.sort(np.concatenate(seen + rest)), np.sort(ids))
            assert len(rest) == 80


def test_a_shard_larger_than_memory_is_permuted_by_blocks_and_says_so() -> None:
    with Gang.filled(deal([8000], 1), memory=2000 * ROW) as gang, Gang.filled(deal([8000], 1)) as roomy:
        rows = np.concatenate([step[0]["row"] for step in steps_of(gang, n=1, batch_size=100)[0]])
        assert sorted(rows) == list(range(8000))
        assert gang.notes[0][0]["shuffle_score"] == 0.25
        for start in range(0, 8000, 2000):
            block = rows[start : start + 2000]
            assert abs(np.corrcoef(block, np.arange(2000))[0, 1]) < 0.1, "in no order within a block"
            assert abs(block.mean() - 4000) < 400, "a block has rows from all over the shard"
        whole = np.concatenate([step[0]["row"] for step in steps_of(roomy, n=1, batch_size=100)[0]])
        for one, other, expected in ((gang, roomy, rows), (roomy, gang, whole)):
            epoch = next(one.shards[0].epochs(1, batch_size=100))
            assert sum(1 for _ in zip(range(31), epoch, strict=False)) == 31
            rest = [b["row"] for b in next(other.shards[0].epochs(1, batch_size=100, resume=one.shards[0].state()))]
            assert np.array_equal(np.concatenate(rest), expected[3100:]), "in the same blocks, with other memory"
        for shuffle, score in (("full", 1.0), (False, 0.0)):
            steps_of(roomy, n=1, batch_size=100, shuffle=shuffle)
            assert roomy.notes[0][-1]["shuffle_score"] == score


# --- settings

BAD = [
    ({"n": -1}, "n=-1 must be a whole number of at least 0"),
    ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
    ({"batch_size": 2.5}, "batch_size=2.5 must be"),
    ({"batch_size": True}, "batch_size=True must be"),
    ({"seed": "x"}, "seed='x' must be a whole number"),
    ({"remainder": "padd"}, "remainder='padd' is none of 'pad', 'drop', 'repeat'. Did you mean 'pad'?"),
    ({"shuffle": "ful"}, "shuffle='ful' is none of 'full', 'stream', True, False. Did you mean 'full'?"),
    ({"shuffle": 7}, "shuffle=7 is none of"),
    ({"shuffle": "stream"}, "tr.Data(df, shuffle='stream')"),
    ({"device": "gpu7"}, "device='gpu7' is no torch device"),
    ({"resume": {"epoch": 1}}, "the state lacks step, index, batch_size"),
]


@pytest.mark.parametrize(("setting", "message"), BAD)
def test_a_bad_setting_is_named_before_anything_is_read(setting: dict[str, Any], message: str) -> None:
    shard = Shard("train", [], FIELDS, index=0, size=1, feed=Feed())  # nothing ever arrives
    with pytest.raises(BadSetting) as caught:
        shard.epochs(**{"n": 1, "batch_size": 4, **setting})
    assert message in str(caught.value)
    assert "shard 'train'" in str(caught.value) or "device" in setting


def test_tensors_without_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BadSetting, match=r"device='cpu' asks for .* has no torch.* device=None for NumPy arrays"):
        Shard("train", [], FIELDS, index=0, size=1, feed=Feed()).epochs(1, batch_size=4, device="cpu")


def test_a_shard_taken_alone_is_prepared_as_before() -> None:
    with Gang.filled(deal([30], 2), False) as gang:
        for shard in gang.shards:
            (epoch,) = shard.alone().epochs(1, batch_size=4)
            assert np.concatenate([batch["row"] for batch in epoch]).tolist() == np.sort(shard.reader.ids).tolist()


def test_a_state_resumes_only_under_its_own_settings_and_counts() -> None:
    with Gang.filled(deal([40], 2), "stream") as gang, Gang.filled(deal([44], 2), "stream") as other:
        shard = gang.shards[0]
        with pytest.raises(BadSetting, match="no position before"):
            shard.state()
        next(iter(next(shard.epochs(2, batch_size=4, shuffle="full"))))
        state = shard.state()
        assert (state["epoch"], state["step"], state["counts"]) == (0, 1, [20, 20])
        with pytest.raises(BadSetting, match=r"batch_size=5 \(was 4\), shuffle='stream' \(was 'full'\)"):
            shard.epochs(2, batch_size=5, resume=state)
        with pytest.raises(DataError, match=r"has \[22, 22\] rows per rank, and had \[20, 20\]"):
            next(other.shards[0].epochs(2, batch_size=4, shuffle="full", resume=state))
        next(iter(next(shard.epochs(2, batch_size=4))))
        streamed = shard.state()
        with pytest.raises(BadSetting, match="this is the one of rank 0, given to rank 1"):
            gang.shards[1].epochs(2, batch_size=4, resume=streamed)
        with pytest.raises(DataError, match="of its 22 rows 18 are not among those seen, and 14 should be"):
            next(other.shards[0].epochs(2, batch_size=4, resume={**streamed, "step": 2}))


def test_the_states_of_all_ranks_are_checked_before_another_size_continues() -> None:
    with (
        Gang.filled(deal([60], 3)) as three,
        Gang.filled(deal([60], 2)) as two,
        Gang.filled(deal([30, 30], 2)) as other,
    ):
        epochs = [iter(next(shard.epochs(1, batch_size=4))) for shard in three.shards]
        for epoch in epochs:
            next(epoch)
        states = [shard.state() for shard in three.shards]
        shard = two.shards[0]
        with pytest.raises(BadSetting, match=r"size=2 \(was 3\).* or give the states of all ranks as a list"):
            shard.epochs(1, batch_size=4, resume=states[0])
        with pytest.raises(BadSetting, match="of all ranks, in rank order, and has those of: 0, 2"):
            shard.epochs(1, batch_size=4, resume=[states[0], states[2]])
        with pytest.raises(BadSetting, match="has those of: none"):
            shard.epochs(1, batch_size=4, resume=[])
        with pytest.raises(BadSetting, match="seed=1, and in the state of rank 0 0"):
            shard.epochs(1, batch_size=4, seed=1, resume=states)
        next(epochs[1])
        with pytest.raises(BadSetting, match="step=1, and in the state of rank 1 2"):
            shard.epochs(1, batch_size=4, resume=[states[0], three.shards[1].state(), states[2]])
        with pytest.raises(DataError, match=r"of the \d+ rows that were seen are not there, the first with id \d+"):
            next(other.shards[0].epochs(1, batch_size=4, resume=states))
        for rank in range(2):  # a list is as good where the size is the same
            assert next(two.shards[rank].epochs(1, batch_size=4, resume=states)).taken == 2
        again = next(three.shards[1].epochs(1, batch_size=4, resume=states))
        assert again.taken == 1


def test_the_state_after_the_last_step_is_the_next_epoch() -> None:
    with Gang.filled(deal([10], 1)) as gang:
        (shard,) = gang.shards
        for epoch in shard.epochs(2, batch_size=5):
            list(epoch)
            assert (shard.state()["epoch"], shard.state()["step"]) == (epoch.number + 1, 0)
        assert list(shard.epochs(2, batch_size=5, resume=shard.state())) == []
        assert [e.number for e in shard.epochs(3, batch_size=5, resume=shard.state())] == [2]


def test_an_epoch_goes_on_where_it_was_left() -> None:
    with Gang.filled(deal([10], 1)) as gang:
        epoch = next(gang.shards[0].epochs(1, batch_size=2))
        first = [batch["row"] for batch, _ in zip(epoch, range(2), strict=False)]
        assert epoch.taken >= 2
        rest = [batch["row"] for batch in epoch]
        assert len(rest) == 5 - epoch.taken + len(rest)
        assert not set(np.concatenate(first)) & set(np.concatenate(rest))
        assert list(epoch) == []
        assert len(gang.notes[0]) == 1


def test_the_default_shuffle_is_what_the_exchange_prepared() -> None:
    for prepared, ordered in (("full", False), (False, True), ("stream", False)):
        with Gang.filled(deal([300], 1), prepared) as gang:
            rows = np.concatenate([b["row"] for b in next(gang.shards[0].epochs(1, batch_size=100))])
            assert np.array_equal(rows, np.arange(300)) == ordered
            assert gang.shards[0].rows == 300
            assert gang.shards[0].counts == [300]


# --- what a batch holds


def spool_with(fields: tuple[Field, ...], ids: np.ndarray, columns: dict[str, Any]) -> Spool:
    spool = Spool(fields)
    spool.append(ids, columns)
    spool.commit()
    return spool


def test_rows_by_id_are_views_of_the_map_and_shuffled_ones_are_copies() -> None:
    with Gang.filled(deal([100], 1)) as gang:
        (shard,) = gang.shards
        ordered = next(iter(next(shard.epochs(1, batch_size=10, shuffle=False))))
        assert not ordered["x"].flags.owndata
        assert not ordered["x"].flags.writeable
        shuffled = next(iter(next(shard.epochs(1, batch_size=10))))
        assert shuffled["x"].flags.writeable
        assert set(ordered) == {"row", "x"}
        assert "row [10], x [10, 2]; epoch 0, step 0, rows 10, scale 1" in repr(ordered)


@pytest.mark.parametrize("shuffle", ["full", False])
def test_tensors_are_copies_in_the_dtype_of_the_column(shuffle: Any) -> None:
    torch = pytest.importorskip("torch")
    with Gang.filled(deal([100], 1)) as gang:
        for device in ("cpu", torch.device("cpu")):
            for batch in next(gang.shards[0].epochs(1, batch_size=32, shuffle=shuffle, device=device)):
                assert batch["row"].dtype == torch.int64
                assert batch["x"].dtype == torch.float32
                assert np.array_equal(batch["x"][:, 0].numpy(), values(batch["row"].numpy()).astype("f4"))
                batch["x"].add_(1)  # must not reach the next epoch, nor the file


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "uint16", "int32", "int64", "float16", "float64"])
def test_every_dtype_becomes_a_tensor(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    field = Field(name="v", sources=("v",), kind="fixed", dtype=dtype, shape=())
    spool = spool_with((field,), np.arange(4), {"v": np.array([0, 1, 1, 0], dtype)})
    batch = next(iter(next(Shard.of("t", spool, (field,)).epochs(1, batch_size=4, shuffle=False, device="cpu"))))
    assert batch["v"].tolist() == [0, 1, 1, 0]
    assert batch["v"].dtype == getattr(torch, dtype)
    spool.close()


@pytest.mark.parametrize("shuffle", ["full", "stream"])
def test_for_another_device_a_thread_is_a_batch_ahead_and_ends_with_the_epoch(shuffle: Any) -> None:
    """torch's meta device stands for an accelerator: whatever is not the CPU takes this way."""
    pytest.importorskip("torch")
    names = [thread.name for thread in threading.enumerate()]
    with Gang.filled(deal([100], 2), "stream", window=20) as gang:
        shard = gang.shards[0]
        for stop in (3, FOREVER):
            for epoch in shard.epochs(2, batch_size=8, device="meta", shuffle=shuffle):
                for number, batch in enumerate(epoch):
                    assert batch["x"].device.type == "meta"
                    assert tuple(batch["x"].shape) == (8 if number < 6 else 2, 2)
                    assert "tritium-batches_0" in [thread.name for thread in threading.enumerate()]
                    if number == stop:
                        break
                assert shard.state()["step"] == (stop + 1 if stop == 3 else 0)
                del epoch, batch
                assert [thread.name for thread in threading.enumerate()] == names


def test_masks_are_columns() -> None:
    fields = (Field(name="y", sources=("y",), kind="fixed", dtype="int64", shape=(), nulls=("mask",)),)
    columns = {"y": np.array([5, 0, 7, 8]), "y_mask": np.array([True, False, True, True])}
    spool = spool_with(fields, np.arange(4), columns)
    batch = next(iter(next(Shard.of("t", spool, fields).epochs(1, batch_size=3, shuffle=False))))
    assert batch["y"].tolist() == [5, 0, 7]
    assert batch["y_mask"].tolist() == [True, False, True]
    assert repr(batch).startswith("Batch(y [3], y_mask [3]; epoch 0")
    spool.close()


def test_bytes_are_decoded_when_a_batch_is_made() -> None:
    torch = pytest.importorskip("torch")
    fields = (Field(name="img", sources=("img",), kind="bytes", dtype="uint8", shape=None),)
    contents = [b"\1\2", b"\3\4", b"\5\6"]
    ragged = Ragged(np.frombuffer(b"".join(contents), np.uint8), np.array([2, 2, 2]))
    spool = spool_with(fields, np.arange(3) + 70, {"img": ragged})

    def decode(content: bytes) -> np.ndarray:
        return np.frombuffer(content, np.uint8).reshape(2, 1).astype("f4")

    shard = Shard.of("t", spool, fields, decode={"img": decode})
    batch = next(iter(next(shard.epochs(1, batch_size=3, shuffle=False))))
    assert batch["img"].tolist() == [[[1], [2]], [[3], [4]], [[5], [6]]]
    batch = next(iter(next(shard.epochs(1, batch_size=3, device="cpu"))))
    assert batch["img"].shape == (3, 2, 1)
    assert batch["img"].dtype == torch.float32
    plain = Shard.of("t", spool, fields)
    assert next(iter(next(plain.epochs(1, batch_size=3, shuffle=False))))["img"].tolist() == contents
    with pytest.raises(BadSetting, match=r"'img' of 't' is bytes, which no tensor holds: give tr\.Data"):
        next(iter(next(plain.epochs(1, batch_size=3, device="cpu"))))
    spool.close()


def test_decode_goes_by_the_name_of_the_source_or_of_the_batch_column() -> None:
    fields = tuple(
        Field(name=name, sources=(source,), kind="bytes", dtype="uint8", shape=None)
        for name, source in (("image", "jpeg"), ("a", "b"), ("b", "a"))
    )
    one = Ragged(np.frombuffer(b"\1\2", np.uint8), np.array([1, 1]))
    spool = spool_with(fields, np.arange(2), dict.fromkeys(("image", "a", "b"), one))

    def times(factor: int) -> Any:
        return lambda content: np.frombuffer(content, np.uint8) * np.float32(factor)

    for name in ("jpeg", "image"):
        shard = Shard.of("t", spool, fields, decode={name: times(10), "a": times(100), "b": times(1000)})
        for rows in (shard, shard.alone()):
            batch = next(iter(next(rows.epochs(1, batch_size=2, shuffle=False))))
            found = {column: batch[column].tolist() for column in batch}
            # "a" and "b" are names of source columns, too, and mean those.
            assert found == {"image": [[10], [20]], "a": [[1000], [2000]], "b": [[100], [200]]}
    spool.close()


def test_what_decode_gets_wrong_is_named_by_column_id_and_value() -> None:
    fields = (Field(name="img", sources=("img",), kind="bytes", dtype="uint8", shape=None),)
    ragged = Ragged(np.frombuffer(b"ab" + b"cde", np.uint8), np.array([2, 3]))
    spool = spool_with(fields, np.array([70, 90]), {"img": ragged})

    def broken(content: bytes) -> Any:
        raise OSError("no image")

    cases = [
        (
            broken,
            r"column 'img' of 't', row 70 of source partition 0, 2 bytes b'ab': decode raised OSError: no image",
            70,
            b"ab",
        ),
        (lambda c: np.frombuffer(c, np.uint8), r"decode gave uint8 of shape \(3,\), and uint8 of shape", 90, b"cde"),
    ]
    for decode, message, row_id, value in cases:
        shard = Shard.of("t", spool, fields, decode={"img": decode})
        with pytest.raises(BadRow, match=message) as caught:
            next(iter(next(shard.epochs(1, batch_size=2, shuffle=False))))
        assert (caught.value.column, caught.value.row_id, caught.value.value) == ("img", row_id, value)
    spool.close()


def test_the_description_may_come_when_the_first_rows_do() -> None:
    field = Field(name="v", sources=("v",), kind="fixed", dtype="float32", shape=None)
    spool, feed, known = Spool((field,)), Feed(), threading.Event()

    def describe() -> list[dict[str, Any]]:
        known.wait()
        return spool.describe()

    shard = Shard("t", describe, (field,), index=0, size=1, feed=feed, prepared="stream", window=2)
    shapes: list[tuple[int, ...]] = []

    def train() -> None:
        for epoch in shard.epochs(1, batch_size=2):
            shapes.extend(batch["v"].shape for batch in epoch)

    thread = threading.Thread(target=train)
    thread.start()
    spool.append(np.arange(3), {"v": np.zeros((3, 5), "f4")})
    tracker = WatermarkTracker(1)
    known.set()
    assert tracker.report(0, spool.commit(), True)
    feed.publish(tracker.watermark)
    thread.join(60)
    spool.close()
    assert shapes == [(2, 5), (1, 5)]
