"""Sets of ids as text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tritium.data.idset import IdSet, in_any, rank_of

some_ids = st.lists(st.sets(st.integers(0, 60)), max_size=4).map(
    lambda parts: np.array([(p << 33) + position for p, part in enumerate(parts) for position in part], np.int64)
)


@given(ids=some_ids, more=some_ids, data=st.data())
def test_a_set_has_exactly_its_ids(ids: np.ndarray, more: np.ndarray, data: st.DataObject) -> None:
    shuffled = ids[np.array(data.draw(st.permutations(range(len(ids)))), np.int64)]
    sets = [IdSet.unpack(IdSet.of(part).pack()) for part in (shuffled, more)]
    assert np.array_equal(sets[0].ids(), np.sort(ids))
    asked = np.concatenate([(p << 33) + np.arange(-3, 70) for p in range(5)])
    assert np.array_equal(sets[0].has(asked), np.isin(asked, ids))
    assert np.array_equal(in_any(sets, asked), np.isin(asked, np.concatenate([ids, more])))


def test_a_shard_is_small_as_text_and_half_of_it_at_most_a_bit_a_row() -> None:
    rng = np.random.default_rng(0)
    ids = np.concatenate([(p << 33) + np.arange(p % 3, 300_000, 3) for p in range(8)])
    assert len(IdSet.of(rng.permutation(ids)).pack()) < 1000
    assert len(IdSet.of(rng.permutation(ids)[: len(ids) // 2]).pack()) < len(ids) / 8 * 1.4


def test_rows_are_dealt_by_partition_and_position() -> None:
    ids = np.array([0, 1, 2, (1 << 33) + 0, (5 << 33) + 4])
    assert rank_of(ids, 3).tolist() == [0, 1, 2, 1, 0]
