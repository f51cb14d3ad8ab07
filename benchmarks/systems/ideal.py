"""The ideal: what no system can avoid, each part by itself, and their sum.

(a) the transform and a shuffle of the packed rows into nothing; (b) importing torch in two processes at once; (c) the
loop over tensors that lie in RAM, in two DDP processes. What (c) trains on is made like the frame's rows, by torch.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import work


def seconds_of(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def shuffle_into_nothing(frame: Any) -> object:
    from pyspark.sql import functions as F

    rows = work.packed(frame).withColumn("_id", F.monotonically_increasing_id())
    to = F.pmod("_id", F.lit(work.RANKS)).cast("int")
    return rows.repartitionById(work.RANKS, to).mapInArrow(work.drop, "a int").collect()


def from_memory(rank: int, port: int, rows: int, epochs: int) -> tuple[tuple[Any, float, int], list[float]]:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(work.RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    torch.manual_seed(rank)
    x = torch.rand(rows, work.WIDTH)
    y = x[:, 0] * 3 + torch.sin(x[:, 1]) - x[:, 2] * x[:, 3]

    def batches(_: int) -> Iterator[tuple[Any, Any]]:
        for index in torch.randperm(rows).split(work.BATCH):
            yield x.index_select(0, index), y.index_select(0, index)

    each: list[float] = []
    return work.train(epochs, batches, each=each), each


def fit(frame: Any, epochs: int) -> work.Fitted:
    rows = frame.count() // work.RANKS
    parts = {
        "etl and shuffle": seconds_of(lambda: shuffle_into_nothing(frame)),
        "import": seconds_of(work.import_torch),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with get_context("spawn").Pool(work.RANKS) as pool:
        found = pool.starmap(from_memory, [(rank, port, rows, epochs) for rank in range(work.RANKS)])
    parts["loop"] = loop = max(seconds for (_, seconds, _), _ in found)
    seconds = sum(parts.values())
    (layers, _, _), _ = found[0]
    rows = sum(taken for (*_, taken), _ in found)
    return work.Fitted(layers, loop, rows, parts | work.by_epoch([each for _, each in found]), seconds=seconds)


if __name__ == "__main__":
    sys.exit(work.main(fit, "torch", "pyarrow"))
