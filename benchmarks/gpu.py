"""Training and scoring on one NVIDIA GPU: what feeding it from a shard costs, and scoring against Spark's own way.

    python benchmarks/gpu.py [--rows 600000] [--rounds 3] [--scoring] [--save]

1. The training loop of an MLP (512-1024-1024-1, Adam, batches of 4096 rows, bf16 autocast), fed by a Tritium shard,
   against the same loop over a tensor that lies in the GPU's memory whole (the ceiling: nothing is copied), over pinned
   batches of a tensor in RAM, copied by hand, and over a `DataLoader` of 4 workers with pinned memory, which takes
   whole batches by an index list (`batch_size=None` with a `BatchSampler`).
2. With `--scoring`, for which PySpark is needed: `TorchModel.transform` with device="cuda" against `predict_batch_udf`
   with the same module on the GPU, from Spark's cache, in `local[4]`.

Every side runs once before it is measured; rounds take turns, and the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import _suite
import numpy as np
import torch

from tritium.data.schema import Field
from tritium.data.shard import Shard

sys.path.insert(0, str(_suite.SYSTEMS))
import batch
import work

WIDTH, BATCH = 512, 4096
FIELDS = (
    Field(name="x", sources=("x",), kind="fixed", dtype="float32", shape=(WIDTH,)),
    Field(name="y", sources=("y",), kind="fixed", dtype="float32", shape=(1,)),
)
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 1))


def train(batches: Batches) -> float:
    """Return the seconds of one epoch."""
    net = mlp().cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def medians(rounds: int, sides: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return the median of each side; the sides take turns, after a first round that does not count."""
    return {name: statistics.median(each[1:]) for name, each in _suite.times(rounds + 1, sides).items()}


def feeding(rows: int, rounds: int) -> dict[str, float]:
    """Return the seconds of an epoch for each way to feed the loop."""
    x = np.random.default_rng(0).random((rows, WIDTH), np.float32)
    y = x[:, :1].copy()
    spool, _ = batch.filled(x, y, FIELDS)
    shard = Shard.of("train", spool, FIELDS)
    in_ram, target = torch.from_numpy(x), torch.from_numpy(y)
    on_gpu, target_on_gpu = in_ram.cuda(), target.cuda()

    def order() -> Iterator[torch.Tensor]:
        return iter(torch.randperm(rows).split(BATCH))

    def resident() -> Batches:
        for part in order():
            where = part.cuda()
            yield on_gpu.index_select(0, where), target_on_gpu.index_select(0, where)

    def by_hand() -> Batches:
        for part in order():
            pinned = in_ram.index_select(0, part).pin_memory(), target.index_select(0, part).pin_memory()
            yield pinned[0].cuda(non_blocking=True), pinned[1].cuda(non_blocking=True)

    def loader() -> Batches:
        data = torch.utils.data.TensorDataset(in_ram, target)
        parts = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), BATCH, drop_last=False)
        loaded: Any = torch.utils.data.DataLoader(data, None, sampler=parts, num_workers=4, pin_memory=True)
        for a, b in loaded:
            yield a.cuda(non_blocking=True), b.cuda(non_blocking=True)

    def tritium() -> Batches:
        for epoch in shard.epochs(1, batch_size=BATCH, device="cuda"):
            for each in epoch:
                yield each["x"], each["y"]

    sides = {"on the GPU": resident, "pinned by hand": by_hand, "DataLoader, 4 workers": loader, "shard": tritium}
    found = medians(rounds, {name: lambda side=side: train(side()) for name, side in sides.items()})  # type: ignore[misc]
    spool.close()
    return found


def scoring(rows: int, rounds: int) -> dict[str, float]:
    """Return the seconds in which each way scores all rows of a cached DataFrame."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import functions as F
    from pyspark.sql.types import FloatType

    import tritium as tr
    from tritium.ml import TorchModel

    work.prepare()
    spark = work.session(**{"spark.master": "local[4]", "spark.driver.memory": "16g"})
    features = f"transform(sequence(1, {WIDTH}), i -> cast((id + i) % 1000 / 1000.0 as float)) as features"
    frame = spark.range(0, rows, 1, 8).selectExpr("id", features).cache()
    frame.count()
    net = mlp()
    model = TorchModel(tr.Model(net, example={"features": np.zeros((2, WIDTH), np.float32)})).setParams(device="cuda")

    def make() -> Callable[[Any], Any]:
        module = net.cuda().eval()

        def predict(features: Any) -> Any:
            with torch.inference_mode():
                return module(torch.from_numpy(np.ascontiguousarray(features)).cuda()).cpu().numpy()[:, 0]

        return predict

    udf = predict_batch_udf(make, return_type=FloatType(), batch_size=4096, input_tensor_shapes=[[WIDTH]])

    def timed(scored: Any) -> float:
        started = time.perf_counter()
        scored.agg(F.sum("prediction")).collect()
        return time.perf_counter() - started

    sides = {
        "predict_batch_udf": lambda: timed(frame.select(udf(F.col("features")).alias("prediction"))),
        "TorchModel": lambda: timed(model.transform(frame)),
    }
    found = medians(rounds, sides)
    spark.stop()
    return found


def told(what: str, rows: int, seconds: dict[str, float]) -> dict[str, Any]:
    """Print how many rows a second each side takes, and the ratio to the first; return them."""
    speeds = {name: rows / took for name, took in seconds.items()}
    first = next(iter(speeds.values()))
    for name, speed in speeds.items():
        print(f"  {what}, {name:24} {speed:12,.0f} rows/s   {speed / first:5.2f}")
    return {"rows": rows, "rows/s": speeds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scoring", action="store_true", help="also score, with Spark")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {options.rows:,} rows × {WIDTH} float32")
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    results["training"] = told("train", options.rows, feeding(options.rows, options.rounds))
    if options.scoring:
        results["scoring"] = told("score", options.rows, scoring(options.rows, options.rounds))
    if options.save:
        _suite.save("gpu", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
