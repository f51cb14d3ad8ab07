"""Rows scored per second: `TorchModel.transform` beside pyspark's `predict_batch_udf` and the bare forward pass.

    python benchmarks/inference.py [--rows 1000000] [--rounds 3]

An MLP 64-256-256-1 over an `array<float>` column read from Parquet, `local[2]`, everything in one session; the best of
the rounds, which take turns. What counts is the ratio within one run: machines differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DoubleType
from torch import nn

import tritium as tr
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature

WIDTH, BATCH = 64, 4096


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).eval()


def tritium(df: Any) -> Any:
    signature = Signature((Input("x", ("features",), "float32", (WIDTH,)),), (Output("y", shape=(1,)),), "regression")
    return TorchModel(tr.Model(network(), signature), batch_size=BATCH).transform(df)


def pyspark_batch_udf(df: Any) -> Any:
    state = {name: value.numpy() for name, value in network().state_dict().items()}

    def make() -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        torch.set_num_threads(1)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).eval()
        net.load_state_dict({name: torch.tensor(value) for name, value in state.items()})

        def predict(inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            with torch.inference_mode():
                return net(torch.tensor(inputs, dtype=torch.float32))[:, 0].numpy().astype(np.float64)

        return predict

    udf = predict_batch_udf(make, return_type=DoubleType(), batch_size=BATCH, input_tensor_shapes=[[WIDTH]])
    return df.withColumn("prediction", udf("features"))


def transfer_alone(df: Any) -> Any:
    def zeros(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for batch in batches:
            yield pa.array(np.zeros(len(batch)))

    zeros.__annotations__ = {"batches": Iterator[pa.Array], "return": Iterator[pa.Array]}
    return df.withColumn("prediction", arrow_udf(zeros, "double").asNondeterministic()("features"))  # type: ignore[call-overload]


def forward_alone(rows: int) -> float:
    net, x = network(), torch.rand(BATCH, WIDTH)
    torch.set_num_threads(2)
    started = time.perf_counter()
    with torch.inference_mode():
        for _ in range(rows // BATCH):
            net(x)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as folder:
        features = F.array(*(F.rand(i).cast("float") for i in range(WIDTH))).alias("features")
        spark.range(0, asked.rows, 1, 4).select("id", features).write.parquet(f"{folder}/rows")
        df = spark.read.parquet(f"{folder}/rows")
        ways = {f.__name__: f for f in (tritium, pyspark_batch_udf, transfer_alone)}
        seconds: dict[str, list[float]] = {name: [] for name in [*ways, "forward_alone"]}
        for turn in range(asked.rounds + 1):  # the first warms up
            for name, way in ways.items():
                started = time.perf_counter()
                way(df).write.format("noop").mode("overwrite").save()
                seconds[name] += [time.perf_counter() - started] * (turn > 0)
            seconds["forward_alone"].append(forward_alone(asked.rows))
    spark.stop()
    best = {name: asked.rows / min(times) for name, times in seconds.items()}
    ratio = {name: round(best["tritium"] / value, 2) for name, value in best.items() if name != "tritium"}
    print(json.dumps({"rows_per_second": {n: round(v) for n, v in best.items()}, "tritium_against": ratio}, indent=2))


if __name__ == "__main__":
    main()
