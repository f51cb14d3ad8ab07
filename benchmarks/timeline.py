"""The cost of `trace=True`: CPU time of a step of the same training, traced and not, in turn.

    .venv/bin/python benchmarks/timeline.py [--turns 400]

Two gangs of one rank and one thread, of which one is traced: an MLP of 21 linear layers, Adam, a gather a step. They
train five steps each in turn, as a busy machine is equally busy for both then. Printed: the CPU time of the rank's
thread for a step, in the fastest tenth of the turns, what tracing adds, and its share of a step of 5 ms. Goal: at most
2 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("plain", "traced")
WIDTH, LAYERS, BATCH = 64, 20, 32
STEPS, STEP_SECONDS = 5, 5e-3


def steps_in_turn(folder: str, way: str) -> list[float]:
    """Return the CPU seconds of a step in each turn. The way whose turn it is gets a byte through its pipe."""
    import torch

    import tritium as tr

    other = WAYS[1 - WAYS.index(way)]
    turn, next_turn = (os.open(f"{folder}/{name}", os.O_RDWR) for name in (way, other))
    world = tr.world()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(net.parameters())
    seconds = []
    for epoch in world.shard("train").epochs(1, batch_size=BATCH):
        for number, batch in enumerate(epoch):
            if number % STEPS == 0:
                os.read(turn, 1)
                begun = time.thread_time()
            optimizer.zero_grad()
            net(batch["x"]).square().mean().backward()
            optimizer.step()
            world.gather(None)
            if number % STEPS == STEPS - 1:
                seconds.append((time.thread_time() - begun) / STEPS)
                os.write(next_turn, b".")
    os.write(next_turn, b".")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=400)
    options = parser.parse_args()
    import numpy as np
    import pyarrow as pa

    import tritium as tr

    os.environ["OMP_NUM_THREADS"] = "1"
    values = np.random.default_rng(0).random(options.turns * STEPS * BATCH * WIDTH, dtype=np.float32)
    data = {"train": pa.table({"x": pa.FixedSizeListArray.from_arrays(values, WIDTH)})}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            os.mkfifo(f"{folder}/{way}")
        runs = {
            way: tr.submit(
                steps_in_turn,
                args=(folder, way),
                on="driver",
                data=data,
                trace=way == "traced",
                progress=False,
                framework="torch",
                run_dir=f"{folder}/run-{way}",
            )
            for way in WAYS
        }
        first = os.open(Path(folder, WAYS[0]), os.O_RDWR)
        os.write(first, b".")
        seconds = {way: run.result()[0] for way, run in runs.items()}
        os.close(first)
    fastest = {way: statistics.quantiles(of_turns, n=10)[0] for way, of_turns in seconds.items()}
    for way, of_turns in seconds.items():
        print(f"{way:<8}{fastest[way] * 1e3:7.3f} ms  (median {statistics.median(of_turns) * 1e3:.3f})")
    added = fastest["traced"] - fastest["plain"]
    print(f"tracing adds {added * 1e6:.0f} µs to a step, {added / STEP_SECONDS:.1%} of one of 5 ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
