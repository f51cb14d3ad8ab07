"""A batch of many columns goes to JAX as few arrays, and comes out as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from tritium.frameworks.packed_batch import PackedBatch, layout_of  # noqa: E402

DTYPES = ("float32", "int32", "bool", "float16")
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 2), (20_000,))


def packed(batch: Any) -> PackedBatch:
    leaves, tree = jax.tree.flatten(batch)
    layout = layout_of(tree, tuple((leaf.dtype, leaf.shape) for leaf in leaves))
    return PackedBatch(layout.packed(leaves), layout)


def batches(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(1, 9))

    def column() -> Any:
        shape = SHAPES[draw.integers(len(SHAPES))]
        return draw.integers(0, 100, (rows, *shape)).astype(DTYPES[draw.integers(len(DTYPES))])

    x: Mapping[str, Any] = {f"c{number}": column() for number in range(draw.integers(1, 30))}
    return [(x, column()), (x, {"a": column(), "b": [column(), None]}, column()), (column(),)][seed % 3]


@pytest.mark.parametrize("seed", range(12))
def test_every_batch_comes_out_of_a_compiled_step_as_it_was(seed: int) -> None:
    batch = batches(seed)
    out = jax.jit(PackedBatch.unpacked)(packed(batch))
    assert jax.tree.structure(out) == jax.tree.structure(batch)
    for given, found in zip(jax.tree.leaves(batch), jax.tree.leaves(out), strict=True):
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        np.testing.assert_array_equal(found, given)


def test_small_columns_of_a_kind_are_one_array_and_a_large_one_is_not_copied() -> None:
    images = np.zeros((4, 100, 100), "float32")
    batch = {**{f"n{number}": np.zeros(4, "float32") for number in range(20)}, "id": np.zeros(4, "int32"), "i": images}
    arrays = packed(batch).arrays
    assert sorted(array.shape for array in arrays) == [(4,), (4, 20), (4, 100, 100)]
    assert any(array is images for array in arrays)


def test_a_step_is_compiled_once_for_a_layout() -> None:
    traced = []

    @jax.jit
    def step(batch: PackedBatch) -> Any:
        traced.append(1)
        return batch.unpacked()["a"].sum()

    def of(*names: str) -> PackedBatch:
        return packed({name: np.full(3, len(name), "float32") for name in names})

    assert float(step(of("a", "bb"))) == float(step(of("a", "bb"))) == 3
    assert len(traced) == 1
    assert float(step(of("bb", "a", "c"))) == 3
    assert len(traced) == 2
