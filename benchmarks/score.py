"""Rows a second of `score(into="parquet:…")` beside `transform().write.parquet`, and of a resume that finds all done.

    .venv/bin/python benchmarks/score.py [--rows 2000000] [--width 64] [--rounds 3] [--partitions 48]

An MLP of width-256-256-1 over Parquet rows of an id and an array of float32, on `local[2]`, all columns written. Both
take turns, in one session; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--partitions", type=int, default=48)
    options = parser.parse_args()
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "3g")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory(prefix="tritium-bench-") as folder:
        numbers = [F.rand(column).cast("float") for column in range(options.width)]
        rows = spark.range(0, options.rows, 1, options.partitions).select("id", F.array(*numbers).alias("x"))
        rows.write.parquet(f"{folder}/rows")
        seconds = compare(spark, folder, options.width, options.rounds)
    spark.stop()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        shown = " ".join(f"{value:.2f}" for value in values)
        print(f"{name:<28}{options.rows / medians[name]:>12,.0f} rows/s   {medians[name]:>7.2f} s   ({shown})")
    print(f"score / transform().write: {medians['transform().write'] / medians['score(into=)']:.3f} of the speed")
    return 0


def compare(spark: Any, folder: str, width: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, by name; the first round warms up and does not count."""
    import torch

    import tritium as tr
    from tritium.model.signature import Input, Output, Signature

    net = torch.nn.Sequential(
        torch.nn.Linear(width, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 1),
    )
    signature = Signature((Input("x", ("x",), "float32", (width,)),), (Output("y", shape=(1,)),), "regression")
    model = tr.Model(net, signature).transformer(batch_size=4096)
    df = spark.read.parquet(f"{folder}/rows")
    settings = {"into": f"parquet:{folder}/scored", "resume": f"{folder}/ledger", "verbose": False}
    ways: dict[str, Callable[[], Any]] = {
        "transform().write": lambda: model.transform(df).write.parquet(f"{folder}/written"),
        "score(into=)": lambda: model.score(df, **settings),
        "score, all finished before": lambda: model.score(df, **settings),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - begun)
        for name in ("written", "scored", "ledger"):
            shutil.rmtree(f"{folder}/{name}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
