"""Convert a rank's result from a file to rows for Spark, and back to values (supervisor, driver)."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterable, Iterator
from typing import IO, Any

import pyarrow as pa

from tritium.errors import ResultError
from tritium.wire import CHUNK

RESULT_SCHEMA = pa.schema([("rank", pa.int32()), ("kind", pa.string()), ("part", pa.int32()), ("body", pa.binary())])
SPARK_SCHEMA = "rank int, kind string, part int, body binary"


def chunks(rank: int, kind: str, file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """Yield a file's bytes as record batches of one row, small enough for Arrow and Spark's buffers."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    for part in range(max(1, -(-size // (CHUNK * 2)))):
        body = file.read(CHUNK * 2)
        yield pa.RecordBatch.from_arrays(
            [_number(rank), _bytes(pa.string(), kind.encode()), _number(part), _bytes(pa.binary(), body)],
            schema=RESULT_SCHEMA,
        )


# Built from buffers, because `pa.array` imports pandas to inspect a list: half a second at the end of a run.
def _number(value: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int32(), 1, [None, pa.py_buffer(struct.pack("=i", value))])


def _bytes(kind: pa.DataType, value: bytes) -> pa.Array:
    offsets = pa.py_buffer(struct.pack("=2i", 0, len(value)))
    return pa.Array.from_buffers(kind, 1, [None, offsets, pa.py_buffer(value)])


def results_of(batches: Iterable[pa.RecordBatch], ranks: int) -> list[Any]:
    """Return the ranks' results in rank order. Raises ResultError when one is missing or can't be unpickled."""
    parts: dict[int, dict[int, pa.Scalar[Any]]] = {}
    for batch in batches:
        for rank, kind, part, body in zip(*(batch.column(i) for i in range(4)), strict=True):
            if kind.as_py() == "result":
                parts.setdefault(rank.as_py(), {})[part.as_py()] = body
    if sorted(parts) != list(range(ranks)):
        raise ResultError(f"Spark handed over the results of ranks {sorted(parts)} only, of {ranks}.")
    results = []
    for rank in range(ranks):
        of_rank = parts.pop(rank)
        body = bytearray().join(of_rank[k].as_buffer() for k in sorted(of_rank))
        del of_rank
        try:
            results.append(pickle.loads(body))
        except Exception as error:
            raise ResultError(
                f"The result of rank {rank} can't be rebuilt on the driver: {error!r}. What it is made of must be "
                "importable here.",
                rank=rank,
            ) from error
    return results
