"""Arrays that leave the JVM as bytes against arrays that leave it number by number, in one session, taking turns.

    .venv/bin/python benchmarks/as_bytes.py [--runs 3] [--only NAME …] [--scale 1.0] [--save]

Exchanges: a whole launch of two ranks that wait until their shard is complete, less a launch without rows; `mapInArrow`
is Spark's own, of the same rows through the same kind of shuffle, or of the same cached rows without one, dropping
every batch. Scoring: a network over all rows into nothing, `TorchModel` against `predict_batch_udf` with the same one.
local[2]; the first time of each side is left out, and the median of the others is shown. `spark.tritium.inside`
is the switch. `--save` writes benchmarks/results/as_bytes.json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import _suite

sys.path.insert(0, str(_suite.SYSTEMS))
import work
from exchange import received

SETTING = "spark.tritium.inside"
Sides = dict[str, Callable[[], object]]


def switched(spark: Any, on: bool, run: Callable[[], object]) -> Callable[[], object]:
    """The same call with arrays as bytes, or number by number."""

    def call() -> object:
        spark.conf.set(SETTING, "" if on else "-jvm_bytes")
        return run()

    return call


def both(spark: Any, run: Callable[[], object]) -> Sides:
    return {"numbers": switched(spark, False, run), "bytes": switched(spark, True, run)}


def written(spark: Any, folder: str, rows: int, width: int) -> Any:
    """Parquet files of an id and an array of `width` floats."""
    from pyspark.sql import functions as F

    path = f"{folder}/{rows}x{width}"
    if not os.path.exists(path):
        numbers = F.array(*[(F.rand(column) * 2 - 1).cast("float") for column in range(min(width, 64))] * (width // 64))
        frame = spark.range(0, rows, 1, 4).select("id", numbers.alias("x"))
        frame.write.option("compression", "none").option("parquet.enable.dictionary", "false").parquet(path)
    return spark.read.parquet(path)


def columns(spark: Any, folder: str, rows: int, width: int) -> Any:
    from pyspark.sql import functions as F

    path = f"{folder}/columns-{rows}x{width}"
    numbers = [F.rand(column).cast("float").alias(f"f{column}") for column in range(width)]
    spark.range(0, rows, 1, 4).select("id", *numbers).write.option("compression", "none").parquet(path)
    return spark.read.parquet(path)


def shuffled(frame: Any) -> Any:
    from pyspark.sql import functions as F

    numbered = frame.select(F.monotonically_increasing_id().alias("_id"), "*")
    return numbered.repartitionById(2, F.pmod("_id", F.lit(2)).cast("int"))


def exchange(spark: Any, frame: Any, plain: Any, width: int) -> Sides:
    """`plain`: the rows with one array, for Spark's own."""
    import tritium as tr

    packed = {"x": [f"f{n}" for n in range(width)]} if "f0" in frame.columns else ["x"]
    data = {"train": tr.Data(frame, columns=packed)}
    sides = both(spark, lambda: received(spark, data))
    sides["mapInArrow"] = lambda: shuffled(plain).mapInArrow(work.drop, "a int").collect()
    return sides


def kept(spark: Any, frame: Any) -> Sides:
    """Launches over persisted rows; each way has its own."""
    import tritium as tr
    from tritium.data.exchange import Exchange

    sides: Sides = {}
    for name, on in (("numbers", False), ("bytes", True)):
        spark.conf.set(SETTING, "" if on else "-jvm_bytes")
        persisted = Exchange({"train": tr.Data(frame, columns=["x"])}, 2).persist()
        sides[name] = lambda persisted=persisted: received(spark, persisted)
    plain = shuffled(frame.select("x")).persist()
    sides["mapInArrow"] = lambda: plain.mapInArrow(work.drop, "a int").collect()
    return sides


def scoring(spark: Any, frame: Any, width: int) -> Sides:
    import torch

    import tritium as tr
    from tritium.ml import TorchModel
    from tritium.model.signature import Input, Output, Signature

    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(256, 1)).eval()
    if width > 64:  # what is measured is the way in
        net = torch.nn.Sequential(torch.nn.Linear(width, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).eval()
    signature = Signature((Input("x", ("x",), "float32", (width,)),), (Output("y", shape=(1,)),), "regression")
    model = TorchModel(tr.Model(net, signature), batch_size=8192)

    def drop(scored: Any) -> None:
        scored.write.format("noop").mode("overwrite").save()

    def make() -> Callable[[Any], Any]:
        import numpy as np
        import torch

        torch.set_num_threads(1)

        def predict(inputs: Any) -> Any:
            with torch.inference_mode():
                return net(torch.from_numpy(inputs))[:, 0].numpy().astype(np.float64)

        return predict

    def batch_udf() -> None:
        from pyspark.ml.functions import predict_batch_udf
        from pyspark.sql.types import DoubleType

        udf = predict_batch_udf(make, return_type=DoubleType(), batch_size=8192, input_tensor_shapes=[[width]])
        drop(frame.withColumn("prediction", udf("x")))

    sides = both(spark, lambda: drop(model.transform(frame)))
    sides["predict_batch_udf"] = batch_udf
    return sides


def cached(frame: Any) -> Any:
    frame = frame.persist()
    frame.count()
    return frame


CASES: dict[str, tuple[int, int, Callable[[Any, str, int, int], Sides]]] = {
    "exchange 600k x 512, Parquet": (
        600_000,
        512,
        lambda spark, folder, rows, width: exchange(
            spark, f := written(spark, folder, rows, width).select("x"), f, width
        ),
    ),
    "exchange 600k x 512, kept": (
        600_000,
        512,
        lambda spark, folder, rows, width: kept(spark, written(spark, folder, rows, width)),
    ),
    "exchange 2M x 64 columns": (
        2_000_000,
        64,
        lambda spark, folder, rows, width: exchange(
            spark, f := columns(spark, folder, rows, width), work.packed(f.selectExpr("*", "0 as y")).drop("y"), width
        ),
    ),
    "scoring 150k x 512, cached": (
        150_000,
        512,
        lambda spark, folder, rows, width: scoring(spark, cached(written(spark, folder, rows, width)), width),
    ),
    "scoring 600k x 512, cached": (
        600_000,
        512,
        lambda spark, folder, rows, width: scoring(spark, cached(written(spark, folder, rows, width)), width),
    ),
    "scoring 600k x 512, Parquet": (
        600_000,
        512,
        lambda spark, folder, rows, width: scoring(spark, written(spark, folder, rows, width), width),
    ),
    "scoring 2M x 64, Parquet": (
        2_000_000,
        64,
        lambda spark, folder, rows, width: scoring(spark, written(spark, folder, rows, width), width),
    ),
}


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the rows")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    work.prepare()
    spark = work.session(**{"spark.driver.memory": "5g"})
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tritium-bench-") as folder:
        os.environ.setdefault("TRITIUM_RUNS", f"{folder}/runs")
        few = {"train": spark.range(2).selectExpr("array(0f) x")}
        launch = statistics.median([timed(lambda: received(spark, few)) for _ in range(options.runs + 1)][1:])
        print(f"a launch without rows: {launch:.2f} s", flush=True)
        for name in options.only:
            rows, width, make = CASES[name]
            rows = int(rows * options.scale)
            sides = make(spark, folder, rows, width)
            clocks = {side: functools.partial(timed, run) for side, run in sides.items()}
            times = _suite.times(options.runs + 1, clocks)
            spark.catalog.clearCache()
            gc.collect()
            megabytes = rows * width * 4 / 1e6
            less = launch if name.startswith("exchange") else 0.0
            medians = {
                side: statistics.median(each[1:]) - (less if side in ("numbers", "bytes") else 0.0)
                for side, each in times.items()
            }
            found[name] = {"MB": megabytes, "seconds": medians, "all": times}
            print(f"\n{name}: {megabytes:.0f} MB" + (", less the launch" if less else ""))
            for side, seconds in medians.items():
                ratio = f"bytes take {medians['bytes'] / seconds:.2f} of it: {seconds / medians['bytes']:.2f} x"
                print(f"  {side:<20}{seconds:>7.2f} s {megabytes / seconds:>6.0f} MB/s   {ratio}", flush=True)
    spark.stop()
    if options.save:
        _suite.save("as_bytes", {"launch": launch, "cases": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
