"""The training loop of two ranks with `hvd.DistributedOptimizer` and with DDP, in turn, over tensors in RAM.

    .venv/bin/python benchmarks/horovod_optimizer.py [--rows 200000] [--rounds 7] [--save]

The MLP, the batches and the optimizer of systems/work.py (64-256-256-1, 1024 rows a rank and step, Adam), one thread a
rank, in the same two processes: a pass over the rows with the one, then with the other, `--rounds` times. Printed:
median seconds of a pass of the slower rank, and the speed as a share of DDP's. Goal: at least 0.9. `horovod.torch` is
Tritium's, or where the real one is installed (`make horovod`) that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import _suite

SYSTEMS = str(Path(__file__).parent / "systems")
WAYS = ("DDP", "hvd.DistributedOptimizer")


def passes(rows: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each pass over `rows` rows of this rank, by way."""
    sys.path.append(SYSTEMS)
    import horovod.torch as hvd
    import torch
    import work

    hvd.init()
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(hvd.rank())
    x = torch.rand(rows, work.WIDTH)
    y = x[:, 0] * 3 + torch.sin(x[:, 1]) - x[:, 2] * x[:, 3]
    steps = {way: step_of(way, hvd, torch, work) for way in WAYS}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, step in steps.items():
            hvd.barrier()
            began = time.perf_counter()
            for index in torch.randperm(rows).split(work.BATCH):
                step(x.index_select(0, index), y.index_select(0, index))
            if number:  # the first pass is for warming up
                found[way].append(time.perf_counter() - began)
    return found


def step_of(way: str, hvd: Any, torch: Any, work: Any) -> Any:
    """Return a function that takes a step with a batch."""
    net = work.make_net()
    if way == "DDP":
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=work.RATE)
    if way != "DDP":
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x).squeeze(1), y).backward()
        optimizer.step()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    import tritium as tr
    import tritium.compat

    os.environ["OMP_NUM_THREADS"] = "1"
    busy = _suite.quiet()
    ranks = tr.launch(
        passes, ranks=2, args=(options.rows, options.rounds), on="driver", framework="torch", progress=False
    )
    found = {way: [max(pair) for pair in zip(*(rank[way] for rank in ranks), strict=True)] for way in WAYS}
    base = statistics.median(found["DDP"])
    print(f"\n{'way':<28}{'s':>8}  {'range':<16}{'of DDP':>7}")
    for way, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"{way:<28}{middle:>8.2f}  {min(seconds):.2f} – {max(seconds):<9.2f}{base / middle:>7.2f}")
    if options.save:
        _suite.save("horovod_optimizer", {"busy before": busy, "passes": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
