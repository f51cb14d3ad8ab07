"""A batch of many columns goes to JAX as few arrays, and comes out as it was. In ranks: JAX minds forks after it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import tritium as tr

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
DTYPES = ("float32", "int32", "bool", "float16")
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 2), (20_000,))


def in_a_rank(work: Callable[[], Any]) -> Any:
    quiet: dict[str, Any] = {"ranks": 1, "on": "driver", "retries": 0, "progress": False, "output": "none"}
    return tr.launch(work, framework="jax", **quiet)[0]


def packed(batch: Any) -> Any:
    import jax

    from tritium.frameworks.packed_batch import PackedBatch, layout_of

    leaves, tree = jax.tree.flatten(batch)
    layout = layout_of(tree, tuple((leaf.dtype, leaf.shape) for leaf in leaves))
    return PackedBatch(layout.packed(leaves), layout)


def batch_of(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(1, 9))

    def column() -> Any:
        shape = SHAPES[draw.integers(len(SHAPES))]
        return draw.integers(0, 100, (rows, *shape)).astype(DTYPES[draw.integers(len(DTYPES))])

    x = {f"c{number}": column() for number in range(draw.integers(1, 30))}
    return [(x, column()), (x, {"a": column(), "b": [column(), None]}, column()), (column(),)][seed % 3]


def test_every_batch_comes_out_of_a_compiled_step_as_it_was() -> None:
    def compare() -> int:
        import jax

        compared = 0
        for seed in range(12):
            batch = batch_of(seed)
            out = jax.jit(lambda given: given.unpacked())(packed(batch))
            assert jax.tree.structure(out) == jax.tree.structure(batch)
            for given, found in zip(jax.tree.leaves(batch), jax.tree.leaves(out), strict=True):
                assert (found.dtype, found.shape) == (given.dtype, given.shape), seed
                np.testing.assert_array_equal(found, given)
                compared += 1
        return compared

    assert in_a_rank(compare) > 50


def test_small_columns_of_a_kind_are_one_array_and_a_large_one_is_not_copied() -> None:
    def pack() -> tuple[list[tuple[int, ...]], bool]:
        many = {f"n{number}": np.zeros(4, "float32") for number in range(20)}
        images = np.zeros((4, 100, 100), "float32")
        arrays = packed({**many, "id": np.zeros(4, "int32"), "images": images}).arrays
        return sorted(array.shape for array in arrays), any(array is images for array in arrays)

    assert in_a_rank(pack) == ([(4,), (4, 20), (4, 100, 100)], True)


def test_a_step_is_compiled_once_for_a_layout() -> None:
    def count() -> list[int]:
        import jax

        traced, found = [], []

        @jax.jit
        def step(batch: Any) -> Any:
            traced.append(1)
            return batch.unpacked()["a"].sum()

        for names in (("a", "bb"), ("a", "bb"), ("bb", "a", "c")):
            assert float(step(packed({name: np.full(3, len(name), "float32") for name in names}))) == 3
            found.append(len(traced))
        return found

    assert in_a_rank(count) == [1, 1, 2]
