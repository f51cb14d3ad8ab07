"""The work that every system is given, and nothing of any system (pyspark 3.5 and 4; needs numpy and pyspark alone).

Rows of 64 float32 features and a label, made by a Spark transform; an MLP 64-256-256-1, MSE, Adam 1e-3, batch 1024 a
rank, 2 ranks, one thread a rank, `local[2]`. A system is a script beside this one with a function
`fit(frame, epochs) -> Fitted`, given to `main`: it is called for a few rows first, so that the session is warm, and
then for all of them with the clock running, from the DataFrame in hand to the model in hand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
WIDTH, BATCH, RANKS, RATE = 64, 1024, 2, 1e-3
FEATURES = [f"f{column}" for column in range(WIDTH)]
LABEL = "y"
WARM_ROWS = 40_000


@dataclass(frozen=True)
class Fitted:
    """What a system gives back."""

    layers: list[tuple[Any, Any]]  # weights (in, out) and bias (out,) of each of the three layers
    loop: float | None  # seconds of the training loop of the slowest rank, from the first batch to the last step
    rows: int | None  # that all ranks took in it, over all epochs
    parts: dict[str, float]  # seconds of what came before it, where that can be told apart
    seconds: float | None = None  # instead of what the clock says


def prepare() -> None:
    """The environment of Spark's workers and of all that they start; what they unpickle imports these modules."""
    os.environ.update(
        OMP_NUM_THREADS="1", PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1", PYTHONPATH=str(HERE)
    )


def init_ray() -> None:
    """Ray on this machine's two cores, without its pages and bars."""
    import ray
    import ray.data

    if not ray.is_initialized():
        runtime = {"env_vars": {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}}
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=runtime)
        ray.data.DataContext.get_current().enable_progress_bars = False


def session(**conf: str) -> Any:
    """The same session for every system: `local[2]`, no pages, no bars, 3 GB for the JVM."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]")
    common = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "3g",
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
    }
    for key, value in {**common, **conf}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")  # pyspark 3.5 does not know spark.log.level
    return spark


def make_frame(spark: Any, rows: int) -> Any:
    """64 columns of uniform numbers in [0, 1) and y = 3 f0 + sin f1 - f2 f3, not yet computed."""
    from pyspark.sql import functions as F

    columns = [F.rand(column).cast("float").alias(name) for column, name in enumerate(FEATURES)]
    label = F.col("f0") * 3 + F.sin("f1") - F.col("f2") * F.col("f3")
    return spark.range(0, rows, 1, 8).select(*columns).withColumn(LABEL, label.cast("float"))


def packed(frame: Any) -> Any:
    """Two columns, `x: array<float>` and `y: float`: what suits the systems that read rows one by one."""
    from pyspark.sql import functions as F

    return frame.select(F.array(*FEATURES).alias("x"), LABEL)


@contextmanager
def as_parquet(frame: Any) -> Iterator[tuple[str, float]]:
    """A folder with the rows in Parquet, and the seconds that writing them took."""
    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        began = time.perf_counter()
        frame.write.mode("overwrite").parquet(f"{folder}/rows")
        yield f"{folder}/rows", time.perf_counter() - began


def read_share(folder: str, rank: int) -> tuple[Any, Any]:
    """Features `[n, 64]` and labels `[n]` of every second file, in RAM."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.concat_tables(pq.read_table(file) for file in sorted(Path(folder).glob("*.parquet"))[rank::RANKS])
    return np.stack([table[name].to_numpy() for name in FEATURES], axis=1), table[LABEL].to_numpy().copy()


def drop(batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: what comes is read, and nothing goes out."""
    for _ in batches:
        pass
    yield from ()


def import_torch() -> None:
    """In as many processes at once as there are ranks: what none of them can do without."""
    all_ = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(RANKS)]
    if sum(process.wait() for process in all_):
        raise RuntimeError("torch can't be imported")


def make_net() -> Any:
    import torch

    layers = [torch.nn.Linear(WIDTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 1))


def layers_of(net: Any) -> list[tuple[Any, Any]]:
    """The weights of a torch MLP as `Fitted` has them."""
    state = [value.detach().cpu().numpy() for value in net.state_dict().values()]
    return [(weight.T, bias) for weight, bias in paired(state)]


def paired(parts: list[Any]) -> list[tuple[Any, Any]]:
    """[weight, bias, weight, bias, …] layer by layer."""
    return list(zip(parts[::2], parts[1::2], strict=True))


def train(
    epochs: int,
    batches: Callable[[int], Any],
    steps: int | None = None,
    each: list[float] | None = None,
    exchange: Callable[[Any], Any] = lambda net: net,
) -> tuple[list[tuple[Any, Any]], float, int]:
    """The loop that every torch system is given: DDP over Gloo, `batches(epoch)` gives (x, y) or (x, y, scale).

    `exchange` takes and returns the DDP, and may choose how it averages gradients.
    Returns the weights, the seconds of this rank's loop and the rows it took; the seconds of each epoch go to `each`.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if own := not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = exchange(torch.nn.parallel.DistributedDataParallel(make_net()))
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    dist.barrier()
    began, rows = time.perf_counter(), 0
    for epoch in range(epochs):
        for number, (x, y, *scale) in enumerate(batches(epoch)):
            if number == steps:
                break
            loss = torch.nn.functional.mse_loss(net(x), y.reshape(-1, 1))
            if scale:
                loss = loss * scale[0]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(x)
        if each is not None:
            each.append(time.perf_counter() - began - sum(each))
    seconds = time.perf_counter() - began
    layers = layers_of(net.module)
    del net, optimizer, loss  # before their process group: torch 2.13 may deadlock where DDP outlives it
    if own:
        dist.destroy_process_group()
    return layers, seconds, rows


def by_epoch(ranks: list[list[float]]) -> dict[str, float]:
    """Seconds of the first epoch and of a later one on average, of the slower rank, from those of all ranks' epochs."""
    first, *later = (max(seconds) for seconds in zip(*ranks, strict=True))
    return {"first epoch": first} | ({"later epochs": sum(later) / len(later)} if later else {})


def mean_squared_error(layers: list[tuple[Any, Any]], rows: int = 20_000) -> float:
    """Of a model on rows that nobody trained on, by numpy: shows that every system has learned the same."""
    random = np.random.default_rng(1)
    x = random.random((rows, WIDTH), dtype=np.float32)
    y = x[:, 0] * 3 + np.sin(x[:, 1]) - x[:, 2] * x[:, 3]
    (first, a), (second, b), (third, c) = layers
    hidden = np.maximum(np.maximum(x @ first + a, 0) @ second + b, 0)
    return float(np.mean((hidden @ third + c - y[:, None]) ** 2))


def versions(*packages: str) -> dict[str, str]:
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}


def main(fit: Callable[[Any, int], Fitted], *packages: str, **conf: str) -> int:
    """Runs a system once and prints what was measured as one line of JSON, the last of the output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    prepare()
    spark = session(**conf)
    fit(make_frame(spark, min(WARM_ROWS, options.rows)), 1)
    frame = make_frame(spark, options.rows)
    began = time.perf_counter()
    fitted = fit(frame, options.epochs)
    seconds = time.perf_counter() - began
    spark.stop()
    found = {
        "seconds": fitted.seconds or seconds,
        "loop": fitted.loop,
        "rows": fitted.rows,
        "mse": mean_squared_error(fitted.layers),
        "parts": fitted.parts,
        "versions": versions("pyspark", *packages),
    }
    print(json.dumps(found), flush=True)
    return 0
