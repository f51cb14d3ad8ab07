"""LightGBM in one process with two threads, on rows that are collected to the driver."""

from __future__ import annotations

import sys
import time
from typing import Any

import growing
import work


def fit(frame: Any, iterations: int) -> growing.Grown:
    import lightgbm
    import numpy as np

    began = time.perf_counter()
    table = frame.toArrow()
    x = np.stack([table[name].to_numpy() for name in work.FEATURES], axis=1)
    y = table[work.LABEL].to_numpy()
    del table
    collected = time.perf_counter() - began
    began = time.perf_counter()
    booster = lightgbm.train({**growing.PARAMS, "num_threads": work.RANKS}, lightgbm.Dataset(x, y), iterations)
    return growing.Grown(booster.predict, time.perf_counter() - began, len(y), {"collect": collected})


if __name__ == "__main__":
    sys.exit(growing.main(fit, "lightgbm", **{"spark.driver.maxResultSize": "0"}))
