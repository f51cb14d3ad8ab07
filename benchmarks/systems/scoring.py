"""What every system scores: rows of an id, a text and 64 float32, by an MLP 64-256-256-1 on two cores, into nothing.

The rows lie in Parquet, once as one array column (`array/`) and once as 64 columns (`columns/`), made by `write`. A
system adds a column `prediction` and keeps the others. One run warms up; the median of the others counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import work

BATCH = 4096


def write(folder: str, rows: int, spark: Any) -> None:
    """Both forms of the rows, in four files each, so that two tasks have two each."""
    from pyspark.sql import functions as F

    columns = [F.rand(column).cast("float").alias(name) for column, name in enumerate(work.FEATURES)]
    frame = spark.range(0, rows, 1, 4).select("id", F.concat(F.lit("row "), "id").alias("text"), *columns)
    frame.write.parquet(f"{folder}/columns")
    kept = spark.read.parquet(f"{folder}/columns")
    kept.select("id", "text", F.array(*work.FEATURES).alias("features")).write.parquet(f"{folder}/array")


def net() -> Any:
    """The same weights everywhere."""
    import torch

    torch.manual_seed(0)
    return work.make_net().eval()


def main(system: Callable[[str], tuple[Callable[[], object], Callable[[], float | None]]], *packages: str) -> int:
    """`system(folder)` gives two functions: score all rows into nothing, and score them for the mean prediction."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    work.prepare()
    into_nothing, mean = system(str(Path(options.folder).resolve()))
    seconds = []
    for _ in range(options.times + 1):
        began = time.perf_counter()
        into_nothing()
        seconds.append(time.perf_counter() - began)
    warm = sorted(seconds[1:])
    found = {"seconds": warm[len(warm) // 2], "cold": seconds[0], "all": seconds, "mean": mean()}
    print(json.dumps({**found, "versions": work.versions(*packages)}), flush=True)
    return 0


def of_spark(transform: Callable[[Any], Any], form: str, **conf: str) -> Callable[[str], Any]:
    """A system that is a function from DataFrame to DataFrame, over the rows of this form."""

    def system(folder: str) -> tuple[Callable[[], object], Callable[[], float]]:
        from pyspark.sql import functions as F

        frame = work.session(**conf).read.parquet(f"{folder}/{form}")
        return (
            lambda: transform(frame).write.format("noop").mode("overwrite").save(),
            lambda: float(transform(frame).agg(F.mean("prediction")).first()[0]),
        )

    return system


if __name__ == "__main__":  # scoring.py FOLDER ROWS
    import sys

    work.prepare()
    write(sys.argv[1], int(sys.argv[2]), work.session())
    print(json.dumps({}))
