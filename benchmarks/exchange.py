"""From the JVM to the ranks: our exchange against Spark's own shuffle of the same bytes into nothing, in one run.

    .venv/bin/python benchmarks/exchange.py [--rows 1000000] [--runs 3] [--kinds array …] [--save]

Sources are Parquet files, written first, of 256 MB with the default rows: `columns` (64 floats), `array`
(array<float>), `vector` (Spark ML's, of doubles), `images` (JPEGs in a binary column); and `strings` (64 MB: 8 columns
of words from a vocabulary). local[2], two tasks. Sides that take turns:

    spark    `repartitionById` of the same columns, `mapInArrow` that drops every batch
    frame    the same over our exchange's own DataFrame: ids, anchors, one struct a name
    full     a whole launch of two ranks that wait until their shard is complete, shuffle="full"
    stream   the same with shuffle="stream"
    direct   `mapInArrow` over the source itself that drops every batch: JVM to Python, and no shuffle
    kept     a launch over an exchange that was persisted before: JVM to rank without a shuffle

Printed for the first time in the session (cold) and for the median of the others (warm): seconds, MB/s of what the
source holds, and the processor seconds of Spark, its workers and the ranks; before, those of a launch over a frame of
two rows: what a gang costs whatever the size of its data, which the last columns leave out. The clock suffers from
other work on the machine; the ratio of processor seconds hardly does. What the fingerprint costs is
benchmarks/exchange_fingerprint.py's. `--save` writes benchmarks/results/exchange.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _suite
import psutil

sys.path.insert(0, str(_suite.SYSTEMS))
import imaging
import work

RANKS, WIDTH = 2, 64
KINDS = ("array", "columns", "vector", "strings", "images")
WORDS = [f"word-{number:03}" for number in range(200)]


class Processor(_suite.Sampler):
    """The processor seconds of this process and all below it, those that end meanwhile included."""

    def __init__(self) -> None:
        super().__init__(0.05)
        self._before = self._now()
        self._seen: dict[int, float] = {}

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.look()
        self.seconds = sum(max(0.0, spent - self._before.get(pid, 0.0)) for pid, spent in self._seen.items())

    def look(self) -> None:
        """What each process has spent so far."""
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


def wait_for_all() -> int:
    import tritium as tr

    return int(tr.world().shard("train").rows)


def received(spark: Any, data: Any) -> list[int]:
    """The rows of each rank of a launch whose ranks wait until their shards are complete."""
    import tritium as tr

    return tr.launch(wait_for_all, ranks=RANKS, data=data, spark=spark, progress=False)


def sources(spark: Any, folder: str, rows: int, kinds: Sequence[str]) -> dict[str, tuple[Any, float]]:
    """Kind → the `tr.Data` of a Parquet file, and the MB that its rows hold."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    import tritium as tr

    numbers = [F.rand(column).cast("float").alias(f"f{column}") for column in range(WIDTH)]
    packed = F.array(*numbers)
    words = [F.element_at(F.lit(WORDS), (F.rand(n) * len(WORDS) + 1).cast("int")).alias(f"s{n}") for n in range(8)]
    vocabulary = {f"s{n}": WORDS for n in range(8)}
    made: dict[str, tuple[list[Any], int, dict[str, Any]]] = {  # columns, bytes a row, settings
        "columns": (numbers, 4 * WIDTH, {"columns": {"x": [f"f{column}" for column in range(WIDTH)]}}),
        "array": ([packed.alias("x")], 4 * WIDTH, {}),
        "vector": ([array_to_vector(packed.cast("array<double>")).alias("x")], 8 * WIDTH, {}),
        "strings": (words, 8 * len(WORDS[0]), {"vocabulary": vocabulary}),
    }
    found: dict[str, tuple[Any, float]] = {}
    for kind in kinds:
        path = f"{folder}/{kind}"
        if kind == "images":
            imaging.write(path, max(1, rows * 4 * WIDTH // 15_000))
            size = sum(file.stat().st_size for file in Path(path).glob("*.parquet"))
            frame = spark.read.parquet(path).select("image")
            found[kind] = (tr.Data(frame, decode={"image": imaging.decode}), size / 1e6)
            continue
        columns, each, settings = made[kind]
        count = rows * 4 * WIDTH // each if kind != "strings" else rows
        writer = spark.range(0, count, 1, 8).select(*columns).write.option("compression", "none")
        writer.option("parquet.enable.dictionary", "false").parquet(path)
        found[kind] = (tr.Data(spark.read.parquet(path), **settings), count * each / 1e6)
    return found


def sides(spark: Any, data: Any, kind: str) -> dict[str, Callable[[], object]]:
    from pyspark.sql import functions as F

    from tritium.data.exchange import Exchange

    def own() -> object:
        numbered = data.frame.select(F.monotonically_increasing_id().alias("_id"), "*")
        dealt = numbered.repartitionById(RANKS, F.pmod("_id", F.lit(RANKS)).cast("int"))
        return dealt.mapInArrow(work.drop, "a int").collect()

    found: dict[str, Callable[[], object]] = {"spark": own}
    for shuffle in ("full", "stream"):
        found[shuffle] = partial(received, spark, {"train": replace(data, shuffle=shuffle)})
    if kind == "array":
        found["frame"] = lambda: Exchange({"train": data}, RANKS).frame.mapInArrow(work.drop, "a int").collect()
        found["direct"] = lambda: data.frame.mapInArrow(work.drop, "a int").collect()
    return found


def without_rows(spark: Any, runs: int) -> list[tuple[float, float]]:
    """Launches over a frame of two rows."""
    from pyspark.sql import functions as F

    few = {"train": spark.range(2).select(F.array(F.lit(0.0).cast("float")).alias("x"))}
    return [measure(partial(received, spark, few)) for _ in range(runs)]


def kept(spark: Any, data: Any, runs: int) -> list[tuple[float, float]]:
    """Launches over rows that are kept, apart from the others: Spark would read them for those, too."""
    from tritium.data.exchange import Exchange

    with Exchange({"train": data}, RANKS).persist() as exchange:
        return [measure(partial(received, spark, exchange)) for _ in range(runs)]


def measure(run: Callable[[], object]) -> tuple[float, float]:
    with Processor() as processor:
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
    return seconds, processor.seconds


def medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor, of all but the first time."""
    clock, spent = zip(*(times[1:] or times), strict=True)
    return statistics.median(clock), statistics.median(spent)


def summary(
    times: dict[str, list[tuple[float, float]]], megabytes: float, start: tuple[float, float]
) -> dict[str, dict[str, float]]:
    """Prints a line a side; ratios are Spark's own seconds by ours. `start`: what a launch takes without any rows."""
    found = {}
    spark_clock, spark_spent = medians(times["spark"])
    print(
        f"{'side':<8}{'cold s':>8}{'warm s':>8}{'MB/s':>7}{'of spark':>10}{'cpu s':>7}{'of spark':>10}   less the start"
    )
    for name, each in times.items():
        clock, spent = medians(each)
        launched = name in ("full", "stream", "kept")
        rest, left = (clock - start[0], spent - start[1]) if launched else (clock, spent)
        found[name] = one = {
            "cold": each[0][0],
            "warm": clock,
            "processor": spent,
            "MB/s": megabytes / clock,
            "of spark": spark_clock / clock,
            "processor of spark": spark_spent / spent,
            "MB/s less start": megabytes / rest,
            "of spark less start": spark_clock / rest,
            "processor of spark less start": spark_spent / left,
        }
        print(
            f"{name:<8}{one['cold']:>8.2f}{clock:>8.2f}{one['MB/s']:>7.0f}{one['of spark']:>9.2f}x{spent:>7.2f}"
            f"{one['processor of spark']:>9.2f}x   {one['MB/s less start']:.0f} MB/s, "
            f"{one['of spark less start']:.2f}x, cpu {one['processor of spark less start']:.2f}x"
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    work.prepare()
    spark = work.session()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="tritium-bench-") as folder:
        os.environ.setdefault("TRITIUM_RUNS", f"{folder}/runs")
        start = medians(without_rows(spark, options.runs + 1))
        print(f"a launch without rows: {start[0]:.2f} s, {start[1]:.2f} s of the processor")
        for kind, (data, megabytes) in sources(spark, folder, options.rows, options.kinds).items():
            busy = _suite.quiet()
            runs = sides(spark, data, kind)
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
            for _ in range(options.runs + 1):
                for name, run in runs.items():
                    times[name].append(measure(run))
            if kind == "array":
                times["kept"] = kept(spark, data, options.runs + 1)
            print(f"\n{kind}: {megabytes:.0f} MB")
            found[kind] = {"MB": megabytes, "busy before": busy, "sides": summary(times, megabytes, start)}
    spark.stop()
    if options.save:
        _suite.save("exchange", {"rows": options.rows, "kinds": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
