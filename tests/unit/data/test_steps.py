"""Which batches the remainder policies make."""

from __future__ import annotations

import itertools

import pytest

from tritium.data.steps import has_batch_of_one, share, step_count


@pytest.mark.parametrize("remainder", ["pad", "drop", "repeat"])
def test_a_batch_of_one_row_is_foreseen(remainder: str) -> None:
    for counts, size in itertools.product(itertools.product(range(1, 8), repeat=2), range(1, 5)):
        shares = (
            share(step, rank, counts, size, remainder)
            for step in range(step_count(counts, size, remainder))
            for rank in range(2)
        )
        rows = [sum(stop - start for start, stop in each.ranges) for each in shares]
        assert has_batch_of_one(counts, size, remainder) == (1 in rows or size == 1), (counts, size)
