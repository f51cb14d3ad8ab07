"""From the JVM to the ranks: our exchange against Spark's own shuffle of the same bytes into nothing, in one run.

    .venv/bin/python benchmarks/exchange.py [--rows 1000000] [--width 64] [--runs 3]

Source: a Parquet file of `array<float>`, written first; local[2], two tasks. Sides that take turns:

    spark    `repartitionById` of the packed column, `mapInArrow` that drops every batch
    sorted   the same over our exchange's own DataFrame: ids, anchors, sort
    full     a whole launch of two ranks that wait until their shard is complete, shuffle="full"
    stream   the same with shuffle="stream"
    start    the same launch over a frame of two rows: what a gang costs whatever the size of its data

Printed for the first time in the session (cold) and for the median of the others (warm): seconds, MB/s of packed
floats, and the processor seconds of Spark, its workers and the ranks. The clock suffers from other work on the machine;
the ratio of processor seconds hardly does. The last column leaves the start out of it. What the fingerprint costs is
benchmarks/exchange_fingerprint.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

RANKS = 2


class Processor:
    """The processor seconds of this process and all below it, those that end meanwhile included."""

    def __enter__(self) -> Processor:
        self._before = self._now()
        self._seen: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        self.seconds = sum(max(0.0, spent - self._before.get(pid, 0.0)) for pid, spent in self._seen.items())

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self._look()

    def _look(self) -> None:
        self._seen.update(self._now())

    def _now(self) -> dict[int, float]:
        me = psutil.Process()
        found = {}
        for process in [me, *me.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            found[process.pid] = times.user + times.system
        return found


def drop(batches: Iterator[Any]) -> Iterator[Any]:
    for _ in batches:
        pass
    yield from ()


def wait_for_all() -> int:
    import tritium as tr

    return int(tr.world().shard("train").rows)


def sides(spark: Any, path: str) -> dict[str, Callable[[], object]]:
    from pyspark.sql import functions as F

    import tritium as tr
    from tritium.data.exchange import Exchange

    frame = spark.read.parquet(path)

    def own() -> object:
        numbered = frame.select(F.monotonically_increasing_id().alias("_id"), "x")
        dealt = numbered.repartitionById(RANKS, F.pmod("_id", F.lit(RANKS)).cast("int"))
        return dealt.mapInArrow(drop, "a int").collect()

    few = spark.range(2).select(F.array(F.lit(0.0).cast("float")).alias("x"))

    def ours(shuffle: str, frame: Any = frame) -> object:
        data = {"train": tr.Data(frame, shuffle=shuffle)}
        return tr.launch(wait_for_all, ranks=RANKS, data=data, spark=spark, progress=False)

    return {
        "spark": own,
        "sorted": lambda: Exchange({"train": frame}, RANKS).frame.mapInArrow(drop, "a int").collect(),
        "full": lambda: ours("full"),
        "stream": lambda: ours("stream"),
        "start": lambda: ours("full", few),
    }


def measure(run: Callable[[], object]) -> tuple[float, float]:
    with Processor() as processor:
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
    return seconds, processor.seconds


def summary(times: dict[str, list[tuple[float, float]]], megabytes: float) -> dict[str, dict[str, float]]:
    """Prints a line a side; ratios are Spark's own seconds by ours."""
    found = {}
    for name, [cold, *warm] in times.items():
        clock, spent = (statistics.median(run[i] for run in warm) for i in (0, 1))
        found[name] = {"cold": cold[0], "warm": clock, "processor": spent, "MB/s": megabytes / clock}
    spark, start = found["spark"], found["start"]["processor"]
    heads = f"{'of spark':>10}{'cpu s':>7}{'of spark':>10}{'less start':>12}"
    print(f"{'side':<8}{'cold s':>8}{'warm s':>8}{'MB/s':>7}{heads}")
    for name, one in found.items():
        one["of spark"], one["processor of spark"] = spark["warm"] / one["warm"], spark["processor"] / one["processor"]
        launched = name in ("full", "stream")
        one["less start"] = spark["processor"] / (one["processor"] - start) if launched else one["processor of spark"]
        print(
            f"{name:<8}{one['cold']:>8.2f}{one['warm']:>8.2f}{one['MB/s']:>7.0f}{one['of spark']:>9.2f}x"
            f"{one['processor']:>7.2f}{one['processor of spark']:>9.2f}x{one['less start']:>11.2f}x"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = (
        builder.config("spark.log.level", "ERROR")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "3g")
        .getOrCreate()
    )
    megabytes = options.rows * options.width * 4 / 1e6
    with tempfile.TemporaryDirectory(prefix="tritium-bench-") as folder:
        path = f"{folder}/rows"
        packed = F.array(*(F.rand(column).cast("float") for column in range(options.width)))
        rows = spark.range(0, options.rows, 1, 8).select(packed.alias("x"))
        rows.write.option("compression", "none").option("parquet.enable.dictionary", "false").parquet(path)
        os.environ.setdefault("TRITIUM_RUNS", f"{folder}/runs")
        runs = sides(spark, path)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(options.runs + 1):
            for name, run in runs.items():
                times[name].append(measure(run))
    spark.stop()
    print(f"{megabytes:.0f} MB of packed floats; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    found = summary(times, megabytes)
    print(json.dumps({"benchmark": "exchange", "megabytes": megabytes, "sides": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
