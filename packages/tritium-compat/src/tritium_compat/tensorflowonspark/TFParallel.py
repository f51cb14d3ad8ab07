"""`TFParallel`: independent instances of a function (driver)."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from tritium import world
from tritium.errors import TritiumWarning
from tritium_compat import jobs
from tritium_compat.tensorflowonspark.TFCluster import file_system, gpus
from tritium_compat.tensorflowonspark.TFSparkNode import context


def run(sc: Any, map_fn: Callable[..., Any], tf_args: Any, num_executors: int, use_barrier: bool = True) -> None:
    """Call `map_fn(tf_args, ctx)` in `num_executors` Spark tasks at once, which TensorFlow does not connect."""
    if not use_barrier:
        warnings.warn(
            "TFParallel.run(use_barrier=False): all are started at once, so there must be slots for all.",
            TritiumWarning,
            stacklevel=2,
        )
    args = (map_fn, tf_args, file_system(sc), os.getcwd())
    jobs.run(alone, num_executors, args=args, framework="tensorflow", gpus=gpus(tf_args))


def alone(map_fn: Callable[..., Any], tf_args: Any, default_fs: str, home: str) -> None:
    """Call the function without TF_CONFIG (rank)."""
    os.environ.pop("TF_CONFIG", None)
    here = world()
    if isinstance(tf_args, list):
        sys.argv = tf_args
    map_fn(tf_args, context(here.size, here.rank, None, None, default_fs, home))
