"""Few rows are dealt again evenly: each once, in the order of their ids, under ids of one partition."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tritium.data.few import MOST_BYTES, MOST_ROWS, Few, deal, is_many
from tritium.data.receiver import Receiver
from tritium.data.schema import Data
from tritium.data.spool import Spool, SpoolReader
from tritium.data.tables import Tables

NAMES = ("train", "validation")


def batch(ids: list[int], anchor: int | None = None) -> pa.RecordBatch:
    """Return rows as the JVM deals them, those of even ids of "train", with their ids as values."""
    kind = pa.struct([("c0", pa.float64())])
    value = [{"c0": float(number)} for number in ids]
    columns = [[v if number % 2 == side else None for v, number in zip(value, ids, strict=True)] for side in (0, 1)]
    anchors: list[int | None] = [None] * len(ids)
    if anchor is not None:
        ids, anchors, columns = [*ids, 999 << 33], [*anchors, anchor], [[*column, None] for column in columns]
    arrays = [pa.array(ids, pa.int64()), pa.array(anchors, pa.int32()), *(pa.array(c, kind) for c in columns)]
    return pa.RecordBatch.from_arrays(arrays, names=["_id", "_anchor", *NAMES])


@given(st.sets(st.tuples(st.integers(0, 200), st.integers(0, 3)), max_size=12), st.integers(1, 4))
def test_every_row_once_and_evenly(places: set[tuple[int, int]], ranks: int) -> None:
    everyone = sorted((partition << 33) + position for partition, position in places)
    dealt = [[number for number in everyone if ((number >> 33) + number) % ranks == rank] for rank in range(ranks)]
    kept = []
    for rank, ids in enumerate(dealt):
        few = Few()
        few.add(batch(ids[:3]))
        few.add(batch(ids[3:], rank))
        kept.append(few)
    streams = deal([few.packed() or b"" for few in kept])
    plan = Tables({name: Data(pa.table({"x": [0.0]})) for name in NAMES}, 1).plan
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    for few, stream, own in zip(kept, streams, dealt, strict=True):
        with ExitStack() as opened:
            spools = {name: opened.enter_context(closing(Spool(fields))) for name, fields in plan.items()}
            receiver = Receiver(plan, spools, sorted=True)
            rows = receiver.rows
            receiver.take(batch(own, 0))
            receiver.restart()
            for piece in few.dealt(stream):
                receiver.take(piece)
            receipt = receiver.finish(confirmed=False)
            assert rows == receipt.rows
            for name in NAMES:
                reader = SpoolReader(receipt.columns[name], receipt.rows[name])
                values = np.array(reader.column("x")).tolist() if receipt.rows[name] else []
                found[name].append((reader.ids.tolist(), values))
    for number, name in enumerate(NAMES):
        counts = [len(ids) for ids, _ in found[name]]
        assert max(counts) - min(counts) <= 1
        by_id = {i: value for ids, values in found[name] for i, value in zip(ids, values, strict=True)}
        assert sorted(by_id) == [(number << 33) + i for i in range(sum(counts))]
        assert [by_id[i] for i in sorted(by_id)] == [float(one) for one in everyone if one % 2 == number]


def test_many_rows_stay_where_they_are() -> None:
    few = Few()
    few.add(batch(list(range(MOST_ROWS // 2))))
    assert few.packed() is not None
    few.add(batch(list(range(MOST_ROWS // 2 + 1))))
    assert few.packed() is None
    assert is_many(1, MOST_BYTES + 1)
