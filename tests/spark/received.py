"""A gang that only receives its rows, for the tests of the exchange."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from tritium.data.exchange import Exchange


def receive(exchange: Exchange, *, confirmed: bool = False) -> list[dict[str, Any]]:
    """Run a gang that only receives. Return per rank its receipt, and each name's columns (and "_id") as arrays."""
    plan, in_order = exchange.plan, exchange.sorted

    def rank(batches: Any) -> Any:
        import pyarrow as pa

        from tritium.data.receiver import Receiver
        from tritium.data.spool import Spool, SpoolReader
        from tritium.spark.inside.end_of_stream import stream_is_complete

        spools = {name: Spool(fields) for name, fields in plan.items()}
        receiver = Receiver(plan, spools, sorted=in_order)
        for batch in batches:
            receiver.take(batch)
        peeked = stream_is_complete()
        receipt = receiver.finish(confirmed=peeked or confirmed)
        columns: dict[str, Any] = {}
        for name, fields in plan.items():
            reader = SpoolReader(receipt.columns[name], receipt.rows[name])
            names = [f.name for f in fields] + [f"{f.name}_mask" for f in fields if f.mask]
            columns[name] = {"_id": np.array(reader.ids)}
            if receipt.rows[name]:
                columns[name] |= {
                    n: [bytes(row) for row in reader.column(n).take(np.arange(receipt.rows[name])).rows()]
                    if any(f.name == n and f.kind == "bytes" for f in fields)
                    else np.array(reader.column(n))
                    for n in names
                }
        for spool in spools.values():
            spool.close()
        found = {"rows": receipt.rows, "parts": receipt.fingerprint, "columns": columns, "peeked": peeked}
        yield pa.RecordBatch.from_pydict({"found": [pickle.dumps(found)]})

    barrier = exchange.ranks <= 2  # local[2] has two slots, and Spark would wait for a third
    done = exchange.frame.mapInArrow(rank, "found binary", barrier=barrier).collect()
    return [pickle.loads(row.found) for row in done]
