"""Permutations without a table, rows by id."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritium.data.order import ORDER_VERSION, blocked, by_id, permutation

ids_of_one_shard = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(0, 3)), min_size=0, max_size=6
).map(
    lambda parts: np.concatenate(
        [np.zeros(0, np.int64)]
        + [(p << 33) + first + stride * np.arange(count) for p, (count, stride, first) in enumerate(parts)]
    )
)


@given(n=st.integers(0, 400), seed=st.integers(-5, 5), epoch=st.integers(0, 3))
def test_a_small_permutation_takes_every_row_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(n, seed, epoch)(np.arange(n)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 100_003, 131_072, 131_073, 262_145])
def test_a_large_permutation_takes_every_row_once(n: int) -> None:
    order = permutation(n, 3, 1)
    rows = np.concatenate([order(np.arange(start, min(start + 9999, n))) for start in range(0, n, 9999)])
    assert np.array_equal(np.sort(rows), np.arange(n))
    some = np.array([n - 1, 0, 17, 17])
    assert np.array_equal(order(some), rows[some]), "a position has one row, however it is asked for"


def test_a_permutation_of_more_rows_than_any_memory_holds() -> None:
    n = 10**12
    rows = permutation(n, 7)(np.arange(50_000))
    assert len(np.unique(rows)) == 50_000
    assert rows.min() >= 0
    assert rows.max() < n
    assert abs(rows.mean() / n - 0.5) < 0.01


@pytest.mark.parametrize("n", [1000, 200_000])
def test_each_seed_and_epoch_has_its_own_order(n: int) -> None:
    orders = [permutation(n, seed, epoch)(np.arange(1000)) for seed in (0, 1, -1) for epoch in range(3)]
    assert np.array_equal(orders[0], permutation(n, 0, 0)(np.arange(1000)))
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.02


@pytest.mark.parametrize("n", [5000, 65_537, 1_000_000])
def test_a_permutation_looks_random(n: int) -> None:
    rows = permutation(n, 11, 0)(np.arange(n))
    assert abs(np.corrcoef(rows, np.arange(n))[0, 1]) < 4 / n**0.5
    assert abs(np.corrcoef(rows[1:], rows[:-1])[0, 1]) < 4 / n**0.5
    cells = 32  # rows of each thirty-second part of the epoch, by the part of the shard that they come from
    table = np.histogram2d(np.arange(n), rows, bins=cells)[0]
    expected = n / cells**2
    chi2 = ((table - expected) ** 2 / expected).sum()
    freedom = (cells - 1) ** 2
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5
    neighbours = np.abs(np.diff(rows[np.argsort(rows)])).max()
    assert neighbours == 1
    near = (np.abs(np.diff(rows)) < n / 1000).mean()  # neighbours in the epoch are not neighbours in the shard
    assert abs(near - 2 / 1000) < 5 * (2 / 1000 / n) ** 0.5 + 1 / n


@pytest.mark.parametrize("n", [70_000, 1_000_000, 3_000_000])
def test_rows_a_power_of_two_apart_in_an_epoch_are_anywhere_in_the_shard(n: int) -> None:
    cells, half = 128, (n - 1).bit_length() // 2  # as the network halves a position
    for lag in (1 << (half - 2), 1 << (half - 1), 1 << half):
        for seed in range(4):
            rows = permutation(n, seed, 1)(np.arange(n))
            seen = np.bincount((rows[lag:] - rows[:-lag]) % n * cells // n, minlength=cells)
            expected = (n - lag) / cells
            chi2 = ((seen - expected) ** 2 / expected).sum()
            assert abs(chi2 - cells + 1) < 5 * (2 * (cells - 1)) ** 0.5, (lag, seed)


@given(n=st.integers(1, 300), block=st.integers(1, 320), seed=st.integers(0, 3), data=st.data())
def test_blocks_take_every_row_once_from_few_rows_at_a_time(n: int, block: int, seed: int, data: st.DataObject) -> None:
    order = blocked(n, block, seed)
    rows = order(np.arange(n))
    assert sorted(rows.tolist()) == list(range(n))
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=5)), np.int64)
    assert np.array_equal(order(some), rows[some])
    if block >= n:
        assert np.array_equal(rows, permutation(n, seed)(np.arange(n)))


def test_a_block_reads_stripes_of_neighbouring_rows() -> None:
    rows = blocked(10_000_000, 1_000_000, 5)(np.arange(1_000_000, 2_000_000))
    inside = np.sort(rows)
    assert (np.diff(inside) > 1).sum() < 1100
    assert abs(np.corrcoef(rows, np.arange(1_000_000))[0, 1]) < 0.01


def test_an_order_of_this_number_never_changes() -> None:
    """A checkpoint continues in its own order only while these hold; where they change, so does the number."""
    assert ORDER_VERSION == 2
    assert permutation(10, 1, 2)(np.arange(10)).tolist() == [0, 8, 1, 5, 2, 7, 9, 6, 3, 4]
    assert permutation(1_000_000, 1, 2)(np.arange(6)).tolist() == [962477, 48697, 326515, 97287, 361361, 866489]


@given(ids=ids_of_one_shard, data=st.data())
def test_by_id_sorts_whatever_order_rows_arrived_in(ids: np.ndarray, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["as it is", "partitions", "any"]))
    if kind == "any":
        ids = ids[data.draw(st.permutations(range(len(ids))))] if len(ids) else ids
    elif kind == "partitions":
        parts = [ids[ids >> 33 == p] for p in data.draw(st.permutations(range(6)))]
        ids = np.concatenate(parts)
    lookup = by_id(ids)
    positions = np.arange(len(ids))
    assert np.array_equal(ids if lookup is None else ids[lookup(positions)], np.sort(ids))
    assert (lookup is None) == bool(np.all(ids[1:] > ids[:-1]))


def test_by_id_of_many_rows_crosses_its_pieces() -> None:
    ids = np.concatenate([(p << 33) + np.arange(700_000) for p in (2, 0, 3, 1)])
    lookup = by_id(ids)
    assert lookup is not None
    some = np.array([0, 699_999, 700_000, 1_048_575, 1_048_576, 1_400_000, 2_799_999])
    assert np.array_equal(ids[lookup(some)], np.sort(ids)[some])
    assert by_id(np.sort(ids)) is None
