"""The receiver: batches of the exchange to spools, and what is never accepted as a complete shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tritium.data.receiver import Receiver
from tritium.data.schema import Data
from tritium.data.spool import Spool, SpoolReader
from tritium.data.tables import Tables
from tritium.errors import BadRow, DataError, IncompleteShard
from tritium.spark.inside.end_of_stream import probe, stream_is_complete


@contextmanager
def receiver(tables: Tables, *, sorted: bool = True) -> Iterator[Receiver]:
    spools = {name: Spool(fields) for name, fields in tables.plan.items()}
    try:
        yield Receiver(tables.plan, spools, sorted=sorted)
    finally:
        for spool in spools.values():
            spool.close()


TABLES = Tables(
    {"train": pd.DataFrame({"k": range(10), "x": np.arange(10) / 2}), "validation": pd.DataFrame({"k": [7, 8]})}, 2
)


def test_rows_arrive_under_their_names_with_their_ids() -> None:
    with receiver(TABLES) as taking:
        for batch in TABLES.batches(0):
            taking.take(batch)
        receipt = taking.finish(confirmed=False)
        assert receipt.rows == taking.rows == {"train": 5, "validation": 1}
        assert {part: rows for part, (rows, _, _) in receipt.fingerprint["train"].items()} == {0: 5}
        reader = SpoolReader(receipt.columns["train"], 5)
        assert reader.ids.tolist() == reader.column("k").tolist() == [0, 2, 4, 6, 8]
        assert SpoolReader(receipt.columns["validation"], 1).ids.tolist() == [(1 << 33) + 1]


def test_rows_of_several_names_in_one_batch_and_rubbish_under_null_structs() -> None:
    ids = pa.array([0, 1, (1 << 33), (1 << 33) + 1, 3 << 33])
    train = pa.StructArray.from_arrays(
        [pa.array([1, 2, 99, 99, 99]), pa.array([0.5, 1.0, float("nan"), None, None])],
        fields=[pa.field("c0", pa.int64()), pa.field("c1", pa.float64())],
        mask=pa.array([False, False, True, True, True]),
    )
    other = pa.StructArray.from_arrays(
        [pa.array([None, None, 5, 6, None], pa.int64())],
        fields=[pa.field("c0", pa.int64())],
        mask=pa.array([True, True, False, False, True]),
    )
    anchor = pa.array([None, None, None, None, 0], pa.int32())
    batch = pa.RecordBatch.from_arrays([ids, anchor, train, other], ["_id", "_anchor", "train", "validation"])
    for pieces in ([batch], [batch.slice(0, 1), batch.slice(1, 2), batch.slice(3)]):
        with receiver(TABLES) as taking:
            for piece in pieces:
                taking.take(piece)
            receipt = taking.finish(confirmed=False)
            assert receipt.rows == {"train": 2, "validation": 2}
            assert SpoolReader(receipt.columns["train"], 2).column("x").tolist() == [0.5, 1.0]
            assert SpoolReader(receipt.columns["validation"], 2).column("k").tolist() == [5, 6]


def test_a_width_is_learned_once() -> None:
    table = pa.table({"v": [[1.0, 2.0]] * 9000 + [[1.0]]})
    tables = Tables({"train": table}, 1)
    with receiver(tables) as taking:
        first, second, *_ = tables.batches(0)
        taking.take(first)
        with pytest.raises(BadRow, match=r"data 'train': column 'v' is of length 1, where 2 was expected") as caught:
            taking.take(second)
    assert (caught.value.name, caught.value.column, caught.value.row_id, caught.value.value) == ("train", "v", 9000, 1)


def test_a_stream_cut_short_is_not_complete() -> None:
    batches = list(TABLES.batches(0))
    for count in range(len(batches)):
        for confirmed in (True, False):
            with receiver(TABLES) as taking:
                for batch in batches[:count]:
                    taking.take(batch)
                with pytest.raises(IncompleteShard, match="the last one is missing") as caught:
                    taking.finish(confirmed=confirmed)
                assert caught.value.rows == taking.rows


def test_unsorted_rows_need_a_confirmed_end() -> None:
    batches = list(TABLES.batches(1))[::-1]
    with receiver(TABLES, sorted=False) as taking:
        for batch in batches:
            taking.take(batch)
        with pytest.raises(IncompleteShard, match="confirmation of their end is missing"):
            taking.finish(confirmed=False)
        unsorted = taking.finish(confirmed=True)
    with receiver(TABLES) as taking:
        for batch in TABLES.batches(1):
            taking.take(batch)
        assert taking.finish(confirmed=False).fingerprint == unsorted.fingerprint


def test_sorted_rows_out_of_order_are_refused() -> None:
    batches = list(TABLES.batches(0))
    for first, second in [(batches[1], batches[0]), (batches[0], batches[0]), (batches[-1], batches[0])]:
        with receiver(TABLES) as taking:
            taking.take(first)
            with pytest.raises(IncompleteShard, match="out of order"):
                taking.take(second)
    both = pa.Table.from_batches([batches[-1], batches[0]]).combine_chunks().to_batches()[0]
    ascending = both.set_column(0, "_id", pa.array(range(both.num_rows)))
    with receiver(TABLES) as taking, pytest.raises(IncompleteShard, match="after the anchor"):
        taking.take(ascending)


def test_masks_are_spooled_beside_their_column() -> None:
    table = pa.table({"a": pa.array([1.0, None]), "b": pa.array([None, 2], pa.int8())})
    data = Data(table, {"x": ["a", "b"]}, nulls={"x": "mask"})
    tables = Tables({"train": data}, 1)
    with receiver(tables) as taking:
        for batch in tables.batches(0):
            taking.take(batch)
        receipt = taking.finish(confirmed=False)
        reader = SpoolReader(receipt.columns["train"], 2)
        assert reader.column("x").tolist() == [[1, 0], [0, 2]]
        assert reader.column("x_mask").tolist() == [[True, False], [False, True]]


def test_outside_a_spark_worker_nobody_knows_whether_a_stream_is_complete() -> None:
    assert stream_is_complete() is None
    with receiver(TABLES, sorted=False) as taking:
        for batch in TABLES.batches(0):
            taking.take(batch)
        with pytest.raises(DataError, match="-end_of_stream"):
            taking.finish(confirmed=None)


def test_the_jvm_sorts_where_that_was_not_tried() -> None:
    tried = {
        version: probe(SimpleNamespace(version=version)) is None for version in ("4.2.0", "4.2.3", "4.20.0", "4.1.1")
    }
    assert tried == {"4.2.0": True, "4.2.3": True, "4.20.0": False, "4.1.1": False}


def test_an_end_after_which_nothing_is_to_be_read_counts_as_cut_short() -> None:
    def main(infile: Any) -> bool | None:
        return stream_is_complete()

    renamed = main.__code__.replace(co_filename="/somewhere/pyspark/worker.py")
    main.__code__ = renamed
    assert main(None) is None
    assert main(object()) is None

    class Infile:
        def __init__(self, rest: bytes) -> None:
            self.rest = rest

        def peek(self, size: int) -> bytes:
            return self.rest[:size]

    assert main(Infile(b"")) is False
    assert main(Infile(b"\xff\xff\xff\xfc")) is True
