"""How fast a supervisor takes packed rows: decode and check, without Spark and without the disk (one thread).

    .venv/bin/python benchmarks/receive.py [--rows 1000000] [--width 64]

Goal: decoding alone over 2 GB/s, since the Arrow buffer is the matrix and nothing is copied. The NaN check reads every
value once, the fingerprint twice. Processor seconds, best of 5.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from tritium.data.fingerprint import Fingerprint
from tritium.data.plan import plan
from tritium.data.receiver import Receiver
from tritium.data.schema import Data

BATCH = 10_000


class Sink:
    """A spool that keeps nothing."""

    rows = 0

    def append(self, ids: Any, columns: Mapping[str, Any]) -> None:
        self.rows += len(ids)

    def commit(self) -> int:
        return self.rows


def batches(rows: int, width: int) -> list[pa.RecordBatch]:
    """What the exchange delivers: `_id`, `_anchor` and a struct with one packed array<float>."""
    rng, made = np.random.default_rng(0), []
    for start in range(0, rows, BATCH):
        values = pa.array(rng.random(BATCH * width, np.float32))
        packed = pa.ListArray.from_arrays(pa.array(np.arange(BATCH + 1, dtype=np.int32) * width), values)
        struct = pa.StructArray.from_arrays([packed], names=["c0"])
        columns = [pa.array(np.arange(start, start + BATCH)), pa.nulls(BATCH, pa.int32()), struct]
        made.append(pa.RecordBatch.from_arrays(columns, names=["_id", "_anchor", "train"]))
    return made


def seconds(given: list[pa.RecordBatch], width: int, nan: Any, fingerprint: bool) -> float:
    """Processor seconds to take all batches."""
    names = [f"f{i}" for i in range(width)]
    schema = pa.schema([(name, pa.float32()) for name in names])
    fields = plan(schema, Data(None, {"x": names}, nan=nan), "train")
    spools: Any = {"train": Sink()}
    receiver, add = Receiver({"train": fields}, spools, sorted=True), Fingerprint.add
    if not fingerprint:
        Fingerprint.add = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        start = time.process_time()
        for batch in given:
            receiver.take(batch)
        return time.process_time() - start
    finally:
        Fingerprint.add = add  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    wanted = parser.parse_args()
    given = batches(wanted.rows, wanted.width)
    size = sum(batch.num_rows for batch in given) * wanted.width * 4 / 1e9
    for text, nan, fingerprint in [
        ("decode", "keep", False),
        ("decode, NaN check", "error", False),
        ("decode, fingerprint", "keep", True),
        ("decode, NaN check, fingerprint", "error", True),
    ]:
        best = min(seconds(given, wanted.width, nan, fingerprint) for _ in range(5))
        print(f"{text:32} {best * 1000:6.1f} ms for {size * 1000:.0f} MB  {size / best:6.1f} GB/s")


if __name__ == "__main__":
    main()
