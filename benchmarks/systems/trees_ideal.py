"""What no system can avoid: the transform and a shuffle, importing LightGBM in two processes, its training over RAM."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from multiprocessing import get_context
from typing import Any

import growing
import work
from ideal import seconds_of, shuffle_into_nothing


def from_memory(rank: int, ports: list[int], rows: int, iterations: int) -> tuple[str, float]:
    """LightGBM's own sockets between two processes, each with its rows as one array."""
    import lightgbm
    import numpy as np

    x = np.random.default_rng(rank).random((rows, work.WIDTH), dtype=np.float32)
    y = x[:, 0] * 3 + np.sin(x[:, 1]) - x[:, 2] * x[:, 3]
    network = {
        "machines": ",".join(f"127.0.0.1:{port}" for port in ports),
        "local_listen_port": ports[rank],
        "num_machines": work.RANKS,
        "pre_partition": True,
        "tree_learner": "data",
        "num_threads": 1,
    }
    began = time.perf_counter()
    booster = lightgbm.train({**growing.PARAMS, **network}, lightgbm.Dataset(x, y), iterations)
    return booster.model_to_string(), time.perf_counter() - began


def import_lightgbm() -> None:
    """In as many processes at once as there are ranks."""
    all_ = [subprocess.Popen([sys.executable, "-c", "import lightgbm"]) for _ in range(work.RANKS)]
    if sum(process.wait() for process in all_):
        raise RuntimeError("lightgbm can't be imported")


def fit(frame: Any, iterations: int) -> growing.Grown:
    import lightgbm

    rows = frame.count() // work.RANKS
    parts = {
        "etl and shuffle": seconds_of(lambda: shuffle_into_nothing(frame)),
        "import": seconds_of(import_lightgbm),
    }
    held = [socket.socket() for _ in range(work.RANKS)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    with get_context("spawn").Pool(work.RANKS) as pool:
        found = pool.starmap(from_memory, [(rank, ports, rows, iterations) for rank in range(work.RANKS)])
    loop = max(seconds for _, seconds in found)
    booster = lightgbm.Booster(model_str=found[0][0])
    return growing.Grown(booster.predict, loop, rows * work.RANKS, parts, sum(parts.values()) + loop)


if __name__ == "__main__":
    sys.exit(growing.main(fit, "lightgbm"))
