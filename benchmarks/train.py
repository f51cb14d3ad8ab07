"""From a DataFrame in hand to a model in hand, against the ideal on the same machine in the same run.

    .venv/bin/python benchmarks/train.py [--rows 1000000] [--epochs 3] [--runs 2] [--only launch estimator]

The work: rows × 64 float32 features and a label, made by a Spark transform (`spark.range` + `rand`); an MLP
64-256-256-1, MSE, Adam 1e-3, batch 1024 a rank, 2 ranks, OMP_NUM_THREADS=1, local[2].

The ideal is the sum of what no system can avoid, each measured here:

    (a) the transform and a shuffle of the packed rows into nothing, warm
    (b) importing torch in two processes at once
    (c) the same loop over tensors that lie in RAM, two DDP processes

Compared: `tr.launch` with a plain PyTorch loop over the shard ("launch"), and `TorchEstimator.fit` ("estimator"), the
first time in the session (cold) and the best of the others (warm), in seconds and as multiples of the ideal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

WIDTH, BATCH, RANKS = 64, 1024, 2
FEATURES = [f"f{column}" for column in range(WIDTH)]


def make_net() -> Any:
    import torch

    layers = [torch.nn.Linear(WIDTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 1))


def fit(batches: Callable[[int], Iterator[tuple[Any, Any, float]]], epochs: int) -> dict[str, Any]:
    """A plain PyTorch loop over `batches(epoch)` of (x, y, scale); its seconds, and the weights of rank 0."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(make_net())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    dist.barrier()
    began, rows = time.perf_counter(), 0
    for epoch in range(epochs):
        for x, y, scale in batches(epoch):
            loss = torch.nn.functional.mse_loss(net(x), y) * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(x)
    seconds = time.perf_counter() - began
    weights = {name: value.numpy() for name, value in net.module.state_dict().items()} if dist.get_rank() == 0 else {}
    del net, optimizer, loss  # before their process group: torch 2.13 may deadlock where DDP outlives it
    dist.destroy_process_group()
    return {"seconds": seconds, "rows": rows, "weights": weights}


def from_shard(epochs: int) -> dict[str, Any]:
    import tritium as tr

    taken = tr.world().shard("train").epochs(epochs, batch_size=BATCH, device="cpu")

    def batches(_: int) -> Iterator[tuple[Any, Any, float]]:
        for batch in next(taken):
            yield batch["x"], batch["y"], batch.scale

    return fit(batches, epochs)


def from_memory(rows: int, epochs: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    x, y = torch.rand(rows, WIDTH), torch.rand(rows, 1)

    def batches(_: int) -> Iterator[tuple[Any, Any, float]]:
        for index in torch.randperm(rows).split(BATCH):
            yield x.index_select(0, index), y.index_select(0, index), 1.0

    return fit(batches, epochs)


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def drop(batches: Iterator[Any]) -> Iterator[Any]:
    for _ in batches:
        pass
    yield from ()


def shuffle_into_nothing(frame: Any) -> object:
    from pyspark.sql import functions as F

    packed = frame.select(F.array(*FEATURES).alias("x"), "y", F.monotonically_increasing_id().alias("_id"))
    return packed.repartitionById(RANKS, F.pmod("_id", F.lit(RANKS)).cast("int")).mapInArrow(drop, "a int").collect()


def import_torch_twice() -> None:
    both = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(RANKS)]
    assert [process.wait() for process in both] == [0] * RANKS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("launch", "estimator"), default=["launch", "estimator"])
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    import tritium as tr
    from tritium.ml import TorchEstimator

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = (
        builder.config("spark.log.level", "ERROR")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "3g")
        .getOrCreate()
    )
    columns = [F.rand(column).cast("float").alias(name) for column, name in enumerate(FEATURES)]
    frame = spark.range(0, options.rows, 1, 8).select(*columns)
    frame = frame.withColumn("y", (F.col("f0") * 3 + F.sin("f1") - F.col("f2") * F.col("f3")).cast("float"))
    data = tr.Data(frame, columns={"x": FEATURES, "y": ["y"]})

    def launch() -> object:
        args = (options.epochs,)
        return tr.launch(
            from_shard, ranks=RANKS, args=args, data={"train": data}, spark=spark, framework="torch", progress=False
        )

    def estimator() -> object:
        import torch

        return TorchEstimator(
            model=make_net,
            loss=torch.nn.MSELoss(),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
            feature_cols=FEATURES,
            label_cols=["y"],
            batch_size=BATCH,
            epochs=options.epochs,
            ranks=RANKS,
            progress=False,
            verbose=False,
        ).fit(frame)

    sides = {name: run for name, run in (("launch", launch), ("estimator", estimator)) if name in options.only}
    with tempfile.TemporaryDirectory(prefix="tritium-bench-") as folder:
        os.environ.setdefault("TRITIUM_RUNS", folder)
        cold = {name: seconds(run) for name, run in sides.items()}
        warm: dict[str, list[float]] = {name: [] for name in sides}
        parts: dict[str, list[float]] = {"a": [], "b": [], "c": []}
        for _ in range(options.runs):
            parts["a"].append(seconds(lambda: shuffle_into_nothing(frame)))
            parts["b"].append(seconds(import_torch_twice))
            args = (options.rows // RANKS, options.epochs)
            loops = tr.launch(
                from_memory, ranks=RANKS, args=args, on="driver", framework="torch", cpus=1, progress=False
            )
            parts["c"].append(max(loop["seconds"] for loop in loops))
            for name, run in sides.items():
                warm[name].append(seconds(run))
    spark.stop()
    a, b, c = (min(parts[part]) for part in "abc")
    ideal = a + b + c
    print(
        f"{options.rows:,} rows, {options.epochs} epochs; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    )
    print(f"ideal: (a) {a:.1f} s + (b) {b:.1f} s + (c) {c:.1f} s = {ideal:.1f} s")
    found: dict[str, Any] = {"ideal": ideal, "a": a, "b": b, "c": c}
    for name in sides:
        best = min(warm[name])
        found[name] = {"cold": cold[name], "warm": best, "of ideal": best / ideal}
        print(f"{name:<10} cold {cold[name]:6.1f} s ({cold[name] / ideal:.2f} x ideal)", end="   ")
        print(f"warm {best:6.1f} s ({best / ideal:.2f} x)")
    print(json.dumps({"benchmark": "train", "rows": options.rows, "epochs": options.epochs, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
