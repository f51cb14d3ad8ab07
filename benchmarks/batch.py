"""What a batch out of the mapped shard costs, against tensors in RAM (one process, one thread, no JVM).

    python benchmarks/batch.py [--rows 1000000] [--rounds 5] [--save]

1. A batch of 1024 × 64 float32 from the shuffled, memory-mapped shard against `index_select` over a tensor in RAM
   with a permutation that is already there. Goal: at most 1.3 times as long.
2. An epoch of training (MLP 64-256-256-1, Adam) over the shard against the same loop over tensors in RAM. Goal: at
   least 0.97 of its rows per second; also with the progress page that a rank's supervisor reads.

Rounds alternate between the sides and the best of each counts, since other work on the machine only ever adds. Times
are CPU times of the process (nothing here waits: the pages are in memory); `--wall` takes those of the clock.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator

import _suite
import numpy as np
import torch

from tritium.data.schema import Field
from tritium.data.shard import Shard
from tritium.data.spool import Spool, SpoolReader
from tritium.gang.rank.progress_page import ProgressPage, ProgressWriter

WIDTH, BATCH = 64, 1024
FIELDS = (
    Field(name="x", sources=("x",), kind="fixed", dtype="float32", shape=(WIDTH,)),
    Field(name="y", sources=("y",), kind="fixed", dtype="float32", shape=(1,)),
)


def filled(x: np.ndarray, y: np.ndarray, fields: tuple[Field, ...] = FIELDS) -> tuple[Spool, float]:
    """A spool of the rows, and the MB/s at which it took them."""
    spool, started = Spool(fields), time.perf_counter()
    for start in range(0, len(x), 10_000):
        part = slice(start, start + 10_000)
        spool.append(np.arange(len(x))[part], {"x": x[part], "y": y[part]})
        spool.commit()
    return spool, spool.bytes / 1e6 / (time.perf_counter() - started)


def seconds(batches: Callable[[], Iterator[object]], clock: Callable[[], float]) -> float:
    started = clock()
    for _ in batches():
        pass
    return clock() - started


def best(rounds: int, sides: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The least of each side; the sides take turns."""
    return {name: min(each) for name, each in _suite.times(rounds, sides).items()}


def train(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], clock: Callable[[], float]) -> float:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(256, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    started = clock()
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return clock() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--wall", action="store_true", help="time by the clock, not by the CPU")
    options = parser.parse_args()
    clock = time.perf_counter if options.wall else time.process_time
    torch.set_num_threads(1)
    n = options.rows
    x = np.random.default_rng(0).random((n, WIDTH), np.float32)
    y = x[:, :1].copy()
    spool, speed = filled(x, y)
    shard = Shard.of("train", spool, FIELDS)
    page = ProgressPage()
    watched = Shard.of("train", spool, FIELDS, on_batch=functools.partial(ProgressWriter.on(page.fd).took, "train"))
    one = Shard.of("train", only_x := spool_of_x(x), FIELDS[:1])
    mapped = SpoolReader(spool.describe(), spool.rows).column("x")
    in_ram, target, permutation = torch.from_numpy(x), torch.from_numpy(y), torch.randperm(n)
    parts = [permutation[start : start + BATCH] for start in range(0, n, BATCH)]
    print(
        f"{n:,} rows × {WIDTH} float32, torch {torch.__version__}, numpy {np.__version__}; spooled at {speed:.0f} MB/s"
    )

    def epoch(shard: Shard, device: str | None) -> Iterator[object]:
        for each in shard.epochs(1, batch_size=BATCH, device=device):
            yield from each

    def ram() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(n)
        for start in range(0, n, BATCH):
            rows = order[start : start + BATCH]
            yield in_ram.index_select(0, rows), target.index_select(0, rows)

    def mine(shard: Shard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for each in shard.epochs(1, batch_size=BATCH, device="cpu"):
            for batch in each:
                yield batch["x"], batch["y"]

    each = best(
        options.rounds,
        {
            "index_select in RAM": lambda: seconds(lambda: (in_ram.index_select(0, part) for part in parts), clock),
            "np.take on the map": lambda: seconds(lambda: (mapped.take(part.numpy(), axis=0) for part in parts), clock),
            "shard, NumPy": lambda: seconds(lambda: epoch(one, None), clock),
            "shard, tensors": lambda: seconds(lambda: epoch(one, "cpu"), clock),
        },
    )
    base = each["index_select in RAM"]
    for name, took in each.items():
        print(f"  {name:22} {took / len(parts) * 1e6:7.1f} µs a batch   {took / base:5.2f}")
    loops = best(
        options.rounds,
        {
            "tensors in RAM": lambda: train(ram(), clock),
            "shard": lambda: train(mine(shard), clock),
            "shard with progress page": lambda: train(mine(watched), clock),
        },
    )
    for name, took in loops.items():
        print(f"  loop over {name:16} {n / took:9,.0f} rows/s   {loops['tensors in RAM'] / took:5.3f}")
    spool.close()
    only_x.close()
    page.close()
    ratio, share = each["shard, tensors"] / base, loops["tensors in RAM"] / loops["shard"]
    print(f"batch {ratio:.2f} (goal ≤ 1.3), loop {share:.3f} (goal ≥ 0.97)")
    if options.save:
        _suite.save("batch", {"batch": ratio, "loop": share})
    return 0


def spool_of_x(x: np.ndarray) -> Spool:
    """Only the matrix, so that a batch of both sides is one column."""
    spool = Spool(FIELDS[:1])
    spool.append(np.arange(len(x)), {"x": x})
    spool.commit()
    return spool


if __name__ == "__main__":
    sys.exit(main())
