"""What no system can avoid: the forward pass alone in two processes, and the array column to Python and a number back.

Their sum is the ideal: on two cores that two tasks keep busy, neither hides behind the other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import scoring
import work


def zeros(frame: Any) -> Any:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql.pandas.functions import arrow_udf

    def none(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for batch in batches:
            yield pa.array(np.zeros(len(batch)))

    none.__annotations__ = {"batches": Iterator[pa.Array], "return": Iterator[pa.Array]}
    return frame.withColumn("prediction", arrow_udf(none, "double").asNondeterministic()("features"))


def forward(rows: int) -> float:
    import torch

    torch.set_num_threads(1)
    net, x = scoring.net(), torch.rand(scoring.BATCH, work.WIDTH)
    with torch.inference_mode():
        net(x)
        began = time.perf_counter()
        for _ in range(rows // scoring.BATCH):
            net(x)
    return time.perf_counter() - began


def system(folder: str) -> tuple[Callable[[], object], Callable[[], None]]:
    transfer, _ = scoring.of_spark(zeros, "array")(folder)
    rows = work.session().read.parquet(f"{folder}/array").count() // work.RANKS
    pool = get_context("spawn").Pool(work.RANKS)

    def both() -> None:
        """Timed as a whole: beside the two parts there is only the pool's message."""
        transfer()
        pool.map(forward, [rows] * work.RANKS, chunksize=1)

    def no_mean() -> None:
        pool.terminate()
        pool.join()

    return both, no_mean


if __name__ == "__main__":
    sys.exit(scoring.main(system, "pyspark", "torch", "pyarrow"))
