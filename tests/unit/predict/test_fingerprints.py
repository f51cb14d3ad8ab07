"""Finished parts are found in a source by the sums of its partitions."""

from __future__ import annotations

import numpy as np
import pytest

from tritium.predict.fingerprints import located, total
from tritium.predict.ledger import Part

Print = tuple[int, int, int]


def random_prints(draw: np.random.Generator, count: int) -> list[Print]:
    """Return some fingerprints; some partitions are empty, and some are equal."""
    several = [(int(rows), int(low), int(high)) for rows, low, high in draw.integers(1, 1 << 40, (count, 3))]
    return [(0, 0, 0) if draw.random() < 0.2 else several[int(draw.integers(max(1, count // 2)))] for _ in range(count)]


def parts_of(draw: np.random.Generator, prints: list[Print]) -> list[Part]:
    """Return finished parts of random sizes, of some of the partitions."""
    parts, first = [], 0
    while first < len(prints):
        count = min(int(draw.integers(1, 5)), len(prints) - first)
        if draw.random() < 0.7:
            parts.append(Part(first, count, fingerprint=total(prints[first : first + count])))
        first += count
    return parts


@pytest.mark.parametrize("seed", range(50))
def test_nothing_has_changed(seed: int) -> None:
    draw = np.random.default_rng(seed)
    prints = random_prints(draw, int(draw.integers(1, 30)))
    parts = parts_of(draw, prints)
    places = {part.id: part.first for part in parts}
    kept, changed, left = located(parts, prints)
    assert not changed
    assert {part.id: part.first for part in kept} == places
    taken = {partition for part in kept for partition in part.partitions}
    assert left == sorted({*range(len(prints))} - taken)


@pytest.mark.parametrize("seed", range(50))
def test_changed_and_moved_partitions(seed: int) -> None:
    draw = np.random.default_rng(seed)
    prints = [(5, number * 7 + 1, number * 11 + 2) for number in range(int(draw.integers(2, 30)))]
    parts = parts_of(draw, prints)
    hit = int(draw.integers(len(prints)))
    new = [(3, 1_000_000, 0)] * int(draw.integers(0, 3))
    now = [*new, *prints[:hit], (5, 999_999, 1), *prints[hit + 1 :]]
    expected = {part.id: part.first + len(new) for part in parts if hit not in part.partitions}
    kept, changed, left = located(parts, now)
    assert {part.id: part.first for part in kept} == expected
    assert {part.id for part in changed} == {part.id for part in parts} - set(expected)
    assert len(left) == len(now) - sum(part.count for part in kept)
    assert hit + len(new) in left
