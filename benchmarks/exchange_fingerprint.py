"""What the fingerprint costs: the same exchange with and without it, in turn, in one run.

    .venv/bin/python benchmarks/exchange_fingerprint.py [--rows 1000000] [--width 64] [--runs 5]

A gang of two on local[2] reads the shuffle, decodes, checks and spools. Printed: the seconds of the job either way
(median of the runs), and the processor seconds inside `Fingerprint.add` as a share of all that Spark and its workers
spent on the same job: on a busy machine that ratio holds where the difference of two clocks does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import psutil


def processor_seconds() -> float:
    """What the JVM and its Python workers have spent so far."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(spent.user + spent.system for spent in times)


def receive(exchange: Any, fingerprint: bool) -> tuple[float, float]:
    """Seconds of one gang over the exchange, and its fingerprints' share of the processor seconds."""
    plan = exchange.plan

    def rank(batches: Any) -> Any:
        import pyarrow as pa

        from tritium.data.fingerprint import Fingerprint
        from tritium.data.receiver import Receiver
        from tritium.data.spool import Spool

        spent, add = [0.0], Fingerprint.add

        def timed(self: Any, ids: Any, columns: Any) -> None:
            start = time.thread_time()
            if fingerprint:
                add(self, ids, columns)
            spent[0] += time.thread_time() - start

        Fingerprint.add = timed  # type: ignore[method-assign]
        try:
            spools = {name: Spool(fields) for name, fields in plan.items()}
            receiver = Receiver(plan, spools, sorted=True)
            for batch in batches:
                receiver.take(batch)
            receiver.finish(confirmed=False)
            for spool in spools.values():
                spool.close()
        finally:
            Fingerprint.add = add  # type: ignore[method-assign]
        yield pa.RecordBatch.from_pydict({"seconds": [spent[0]]})

    start, before = time.perf_counter(), processor_seconds()
    rows = exchange.frame.mapInArrow(rank, "seconds double", barrier=True).collect()
    seconds, busy = time.perf_counter() - start, processor_seconds() - before
    return seconds, sum(row.seconds for row in rows) / busy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    wanted = parser.parse_args()

    os.environ["PYSPARK_PYTHON"] = sys.executable  # the workers too have tritium
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from tritium.data.exchange import Exchange
    from tritium.data.schema import Data

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    names = [f"f{i}" for i in range(wanted.width)]
    columns = [(F.col("id") * (i + 1) % 1009).cast("float").alias(name) for i, name in enumerate(names)]
    frame = spark.range(0, wanted.rows, 1, 8).select(*columns)
    data = {"train": Data(frame, {"x": names})}
    receive(Exchange(data, 2), True)  # warm
    without, with_it, share = [], [], []
    for _ in range(wanted.runs):
        without.append(receive(Exchange(data, 2), False)[0])
        seconds, part = receive(Exchange(data, 2), True)
        with_it.append(seconds)
        share.append(part)
    spark.stop()
    size = wanted.rows * wanted.width * 4 / 1e6
    print(f"{wanted.rows:,} rows x {wanted.width} floats = {size:.0f} MB to 2 ranks, median of {wanted.runs}")
    print(f"without fingerprint {statistics.median(without):6.2f} s")
    print(f"with fingerprint    {statistics.median(with_it):6.2f} s")
    print(f"fingerprint         {statistics.median(share):6.2%} of the processor time of the exchange")


if __name__ == "__main__":
    main()
