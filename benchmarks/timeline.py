"""The cost of `trace=True`: CPU time of a step of the same training, traced and not, in turn.

    .venv/bin/python benchmarks/timeline.py [--steps 300] [--rounds 5]

One rank, one thread: an MLP of 21 linear layers, Adam, a gather a step; each round is a launch of its own. CPU time of
the rank's thread in the fastest 20 steps of all rounds, as a busy machine changes that least. Printed: what tracing
adds to a step, and its share of one of 5 ms. Goal: at most 2 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

WAYS = ("plain", "traced")
WIDTH, LAYERS, BATCH = 64, 20, 32
PART, STEP_SECONDS = 20, 5e-3


def step_of(steps: int) -> float:
    """Return the CPU seconds of a step in the fastest 20."""
    import torch

    import tritium as tr

    world = tr.world()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(net.parameters())
    moments = []
    for epoch in world.shard("train").epochs(1, batch_size=BATCH):
        for batch in epoch:
            optimizer.zero_grad()
            net(batch["x"]).square().mean().backward()
            optimizer.step()
            world.gather(None)
            moments.append(time.thread_time())
    part = min(PART, steps - 1)
    return min((b - a) / part for a, b in zip(moments[::part], moments[part::part], strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    import numpy as np
    import pyarrow as pa

    import tritium as tr

    os.environ["OMP_NUM_THREADS"] = "1"
    values = np.random.default_rng(0).random(options.steps * BATCH * WIDTH, dtype=np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values, WIDTH)})
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds * 2):
        way = WAYS[number % 2]
        facts: dict[str, Any] = {"trace": way == "traced", "progress": False, "framework": "torch"}
        seconds[way] += tr.launch(step_of, args=(options.steps,), ranks=1, on="driver", data={"train": table}, **facts)
    for way, steps in seconds.items():
        print(f"{way:<8}{min(steps) * 1e3:7.3f} ms  (rounds up to {max(steps) * 1e3:.3f})")
    plain, traced = (min(seconds[way]) for way in WAYS)
    print(
        f"tracing adds {(traced - plain) * 1e6:.0f} µs to a step, {(traced - plain) / STEP_SECONDS:.1%} of one of 5 ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
