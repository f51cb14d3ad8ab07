"""Few rows, which are dealt to the ranks again when all are there (supervisor, coordinator).

The JVM deals each source partition for itself, so that ranks may differ by a row for each partition: of 5 rows in 200
partitions 3 ranks may get 3, 0 and 2. Few rows are cheap to collect, and then dealt as those of one partition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritium.data.idset import PARTITION_BITS, rank_of

MOST_ROWS = 4096
"""Of all ranks and names together. With more, a row more or less on a rank makes no difference."""
MOST_BYTES = 4 << 20
"""Of all ranks together, as they pass through the coordinator."""


class Few:
    """A copy of the rows of one rank, as long as they are few."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] | None = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Keep a batch as it came: `_id`, `_anchor`, a struct for each name."""
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._batches is not None and batch.num_rows:
            self._batches = None if is_many(self._rows, self._bytes) else [*self._batches, batch]

    def packed(self) -> bytes | None:
        """Return the rows without the anchor as an Arrow stream; None where they are many."""
        return None if self._batches is None else _packed(self._table(anchor=False))

    def dealt(self, stream: bytes) -> list[pa.RecordBatch]:
        """Return the rows that this rank has been dealt in place of its own, and its anchor, which comes last."""
        anchor = self._table(anchor=True)
        number = (len(anchor.schema.names) + anchor.column(1)[0].as_py()) << PARTITION_BITS
        anchor = anchor.set_column(0, anchor.schema.field(0), [pa.array([number], pa.int64())])
        rows: list[pa.RecordBatch] = pa.ipc.open_stream(stream).read_all().to_batches()
        return [*rows, *anchor.to_batches()]

    def _table(self, *, anchor: bool) -> pa.Table:
        table = pa.Table.from_batches(self._batches)
        is_anchor = table.column(1).is_valid()
        return table.filter(is_anchor if anchor else pc.invert(is_anchor)).combine_chunks()


def is_many(rows: int, size: int) -> bool:
    """Return whether so many rows of so many bytes together are left as the JVM has dealt them."""
    return rows > MOST_ROWS or size > MOST_BYTES


def deal(streams: Sequence[bytes]) -> list[bytes]:
    """Return the rows that each rank is dealt, of those of all ranks in rank order, as `Few.packed` makes them.

    The rows of a name are numbered in the order of their ids, and get these numbers as ids of one source partition.
    """
    table = pa.concat_tables(pa.ipc.open_stream(stream).read_all() for stream in streams).combine_chunks()
    table = table.take(np.argsort(table.column(0).to_numpy(), kind="stable"))
    ids = np.zeros(table.num_rows, np.int64)
    for number in range(table.num_columns - 2):
        of_name = table.column(number + 2).is_valid().to_numpy()
        ids[of_name] = (number << PARTITION_BITS) + np.arange(of_name.sum())
    table = table.set_column(0, table.schema.field(0), [pa.array(ids)]).take(np.argsort(ids, kind="stable"))
    owner = rank_of(np.sort(ids), len(streams))
    return [_packed(table.filter(pa.array(owner == rank))) for rank in range(len(streams))]


def _packed(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
