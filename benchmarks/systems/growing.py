"""The trees that every system of trees.py is given to grow, and nothing of any system (pyspark 3.5 and 4).

A system is a script beside this one with a function `fit(frame, iterations) -> Grown`, given to `main`: it is called
for a few rows first, so that the session is warm, and then for all of them with the clock running.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import work

LEAVES, BINS, RATE = 31, 255, 0.1
PARAMS = {"objective": "regression", "num_leaves": LEAVES, "max_bin": BINS, "learning_rate": RATE, "verbosity": -1}


@dataclass(frozen=True)
class Grown:
    """What a system gives back."""

    predict: Callable[[Any], Any]  # float32 [n, 64] -> [n]; called when the clock has stopped
    loop: float | None = None  # seconds of the training itself, where that can be told apart
    rows: int | None = None
    parts: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None  # instead of what the clock says


def mean_squared_error(predict: Callable[[Any], Any], rows: int = 20_000) -> float:
    """Of a model on rows that nobody trained on."""
    random = np.random.default_rng(1)
    x = random.random((rows, work.WIDTH), dtype=np.float32)
    y = x[:, 0] * 3 + np.sin(x[:, 1]) - x[:, 2] * x[:, 3]
    return float(np.mean((np.asarray(predict(x)) - y) ** 2))


def main(fit: Callable[[Any, int], Grown], *packages: str, **conf: str) -> int:
    """Runs a system once and prints what was measured as one line of JSON, the last of the output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()
    work.prepare()
    spark = work.session(**conf)
    fit(work.make_frame(spark, min(work.WARM_ROWS, options.rows)), 2)
    frame = work.make_frame(spark, options.rows)
    began = time.perf_counter()
    grown = fit(frame, options.iterations)
    seconds = time.perf_counter() - began
    found = {
        "seconds": grown.seconds or seconds,
        "loop": grown.loop,
        "rows": grown.rows,
        "mse": mean_squared_error(grown.predict),
        "parts": grown.parts,
        "versions": work.versions("pyspark", *packages),
    }
    spark.stop()
    print(json.dumps(found), flush=True)
    return 0
