"""Loaders of torch over Petastorm's readers."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")

from tritium.compat.petastorm import TransformSpec, make_batch_reader, make_reader  # noqa: E402
from tritium.compat.petastorm.pytorch import (  # noqa: E402
    BatchedDataLoader,
    DataLoader,
    InMemBatchedDataLoader,
    decimal_friendly_collate,
)

WRITTEN = f"file://{Path(__file__).with_name('data')}/petastorm"


@pytest.fixture(scope="module")
def rides(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of 95 rows in row groups of 10."""
    place = tmp_path_factory.mktemp("rides")
    ids = np.arange(95)
    table = pa.table({"id": ids, "x": (ids / 2).astype(np.float32), "v": [[i, -i] for i in ids.tolist()], "b": ids > 5})
    pq.write_table(table, place / "0.parquet", row_group_size=10)
    return f"file://{place}"


def numbers(loader: Any) -> list[int]:
    return [int(i) for batch in loader for i in batch["id"]]


@pytest.mark.parametrize("make", [DataLoader, BatchedDataLoader])
def test_batches_of_columns(rides: str, make: Any) -> None:
    with make(make_batch_reader(rides, shuffle_row_groups=False), batch_size=16) as loader:
        batches = list(loader)
        assert [len(batch["id"]) for batch in batches] == [16] * 5 + [15]
        assert numbers(batches) == list(range(95))
        first = batches[0]
        assert (first["id"].dtype, first["x"].dtype, first["v"].shape) == (torch.int64, torch.float32, (16, 2))
        assert first["b"].dtype == torch.uint8
        assert first["v"][3].tolist() == [3, -3]
        assert numbers(loader) == list(range(95))  # again


@pytest.mark.parametrize("make", [DataLoader, BatchedDataLoader])
@pytest.mark.parametrize("capacity", [1, 30, 1000])
def test_rows_are_drawn_from_those_that_wait(rides: str, make: Any, capacity: int) -> None:
    torch.manual_seed(0)
    with make(make_batch_reader(rides, seed=1), batch_size=8, shuffling_queue_capacity=capacity) as loader:
        batches = list(loader)
    assert [len(batch["id"]) for batch in batches] == [8] * 11 + [7]
    found = numbers(batches)
    assert sorted(found) == list(range(95))
    assert found[:10] != sorted(found[:10])


def test_rows_one_by_one_and_a_collate_function(rides: str) -> None:
    with DataLoader(make_reader(WRITTEN, ["id", "matrix", "png", "decimal"], seed=0), batch_size=1) as loader:
        batches = list(loader)
    assert len(batches) == 6
    assert batches[0]["png"].shape == (1, 6, 7, 3)
    assert isinstance(batches[0]["decimal"][0], Decimal)
    with DataLoader(make_batch_reader(rides), 10, collate_fn=lambda rows: [row["x"] for row in rows]) as loader:
        assert len(next(iter(loader))) == 10
    with BatchedDataLoader(make_reader(WRITTEN, ["id", "compressed"]), batch_size=4) as loader:
        assert [batch["compressed"].shape for batch in loader] == [(4, 4, 5), (2, 4, 5)]
    made = decimal_friendly_collate([{"a": "x", "b": (1, 2.0)}] * 2)
    assert (made["a"], [each.tolist() for each in made["b"]]) == (["x", "x"], [[1, 1], [2.0, 2.0]])


def test_in_memory(rides: str) -> None:
    loader = InMemBatchedDataLoader(
        make_batch_reader(rides, num_epochs=None, seed=1), 16, num_epochs=2, rows_capacity=40, shuffle=True, seed=3
    )
    batches = list(loader)
    assert [len(batch["id"]) for batch in batches] == [16, 16, 8] * 2
    assert sorted(numbers(batches[:3])) == sorted(numbers(batches[3:]))
    assert numbers(batches[:3]) != numbers(batches[3:])
    with pytest.raises(RuntimeError, match="is read once"):
        list(loader)


def test_what_a_tensor_cannot_hold(rides: str) -> None:
    with DataLoader(make_reader(WRITTEN, ["long_or_none"], reader_pool_type="dummy")) as loader:
        with pytest.raises(TypeError, match="'long_or_none' is None"):
            list(loader)
        with pytest.raises(RuntimeError, match="The last pass over this loader failed"):
            list(loader)

    def words(frame: Any) -> Any:
        return frame.assign(word="a")

    spec = TransformSpec(words, [("word", np.str_, (), False)])
    loader = BatchedDataLoader(make_batch_reader(rides, transform_spec=spec))
    with loader, pytest.raises(TypeError, match="'word' holds strings"):
        list(loader)
    with DataLoader(make_batch_reader(rides), 10) as loader:
        first = iter(loader)
        next(first)
        with pytest.raises(RuntimeError, match="The last pass over this loader has not ended"):
            next(iter(loader))
        first.close()
