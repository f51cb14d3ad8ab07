"""What no JAX system can avoid: the transform and a shuffle, importing JAX in two processes, the loop over RAM."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import jax_work
import work
from ideal import seconds_of, shuffle_into_nothing


def from_memory(rank: int, port: int, rows: int, epochs: int) -> tuple[Any, float, int]:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", work.RANKS, rank)
    split = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()), ("data",)), jax.sharding.PartitionSpec("data")
    )
    random = np.random.default_rng(rank)
    x = random.random((rows, work.WIDTH), dtype=np.float32)
    y = x[:, 0] * 3 + np.sin(x[:, 1]) - x[:, 2] * x[:, 3]
    whole = np.ones(work.BATCH, np.float32)

    def batches(_: int) -> Iterator[tuple[Any, Any, Any]]:
        order = random.permutation(rows)
        for start in range(0, rows, work.BATCH):
            index = order[start : start + work.BATCH]
            weights = whole
            if len(index) < work.BATCH:  # the last batch, filled up
                weights = (np.arange(work.BATCH) < len(index)).astype(np.float32)
                index = np.resize(index, work.BATCH)
            yield tuple(jax.make_array_from_process_local_data(split, part) for part in (x[index], y[index], weights))

    found = jax_work.train(epochs, batches)
    jax.distributed.shutdown()
    return found


def fit(frame: Any, epochs: int) -> work.Fitted:
    rows = frame.count() // work.RANKS
    parts = {
        "etl and shuffle": seconds_of(lambda: shuffle_into_nothing(frame)),
        "import": seconds_of(jax_work.import_jax),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    with ProcessPoolExecutor(work.RANKS, get_context("spawn")) as pool:  # which tells when one has died
        ranks = [pool.submit(from_memory, rank, port, rows, epochs) for rank in range(work.RANKS)]
        found = [rank.result() for rank in ranks]
    parts["processes and loop"] = time.perf_counter() - began
    loop = max(seconds for _, seconds, _ in found)
    seconds = parts["etl and shuffle"] + parts["import"] + loop
    return work.Fitted(found[0][0], loop, sum(taken for *_, taken in found), parts, seconds=seconds)


if __name__ == "__main__":
    sys.exit(work.main(fit, "jax", "pyarrow"))
