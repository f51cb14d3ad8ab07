"""What every system launches: a function that does nothing, and one that forms a Gloo group of torch's and adds up.

`main` is given the system's way to run a function on two ranks. Each is launched once before the clock counts, then
`--times` times; both functions take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import work


def nothing() -> int:
    return 1


def group() -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if own := not dist.is_initialized():
        dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    if own:
        dist.destroy_process_group()
    return int(one)


def main(launch: Callable[[Callable[[], int]], Any], *packages: str) -> int:
    """`launch(function)` runs it on two ranks and returns what rank 0 returned. Prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ways: dict[str, Callable[[], Any]] = {
        "nothing": lambda: launch(nothing),
        "group": lambda: launch(group),
        "import": work.import_torch,
    }
    if (said := [ways["nothing"](), ways["group"]()]) != [1, work.RANKS]:
        raise RuntimeError(f"the ranks returned {said}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.times):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    found = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    print(json.dumps({**found, "all": seconds, "versions": work.versions(*packages)}), flush=True)
    return 0
