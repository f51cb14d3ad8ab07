"""Train LightGBM on a DataFrame with two ranks, each with its half of the rows."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr


def train(params):
    import lightgbm

    rows = own_rows("train")
    booster = lightgbm.train(params, lightgbm.Dataset(rows["x"], rows["y"]), num_boost_round=50)
    return booster.model_to_string()


def own_rows(name):
    """Return all columns of this rank's rows."""
    shard = tr.world().shard(name)
    epoch = next(shard.epochs(1, batch_size=max(shard.counts), shuffle=False, device=None))
    return next(iter(epoch))


def main():
    import lightgbm

    spark = SparkSession.builder.master("local[2]").getOrCreate()
    numbers = spark.range(4000).select((F.rand(1) * 2 - 1).alias("a"), (F.rand(2) * 2 - 1).alias("b"))
    df = numbers.select(F.array("a", "b").alias("x"), F.expr("a * b + a").alias("y"))
    params = {"objective": "regression", "num_threads": 1, "verbose": -1}
    models = tr.launch(train, ranks=2, args=(params,), data={"train": df}, framework="lightgbm", spark=spark)
    one, other = (lightgbm.Booster(model_str=text) for text in models)
    points = np.random.default_rng(0).uniform(-1, 1, (1000, 2))
    error = np.abs(one.predict(points) - points[:, 0] * points[:, 1] - points[:, 0]).mean()
    print(f"mean error {error:.4f}")
    assert error < 0.1
    assert (one.predict(points) == other.predict(points)).all()
    spark.stop()


if __name__ == "__main__":
    main()
