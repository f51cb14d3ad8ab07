"""Estimate a regression from sums over all rows, which mpi4py adds up over the ranks of a gang on Spark."""

from __future__ import annotations

import os
import sys

import numpy as np

import tritium as tr

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else Spark starts the python3 of the PATH


def fit() -> list[float]:
    """Return the coefficients and the intercept of the least squares of `y` on `x`."""
    from mpi4py import MPI

    squares, products = np.zeros((4, 4)), np.zeros(4)
    (epoch,) = tr.world().shard("train").epochs(1, batch_size=1024, device=None)
    for batch in epoch:
        x = np.concatenate([batch["x"], np.ones((len(batch["x"]), 1))], axis=1)[: batch.rows]
        squares += x.T @ x
        products += x.T @ batch["y"][: batch.rows]
    ranks = MPI.COMM_WORLD
    ranks.Allreduce(MPI.IN_PLACE, squares)
    ranks.Allreduce(MPI.IN_PLACE, products)
    return [float(value) for value in np.linalg.solve(squares, products)]


def main() -> None:
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import array, expr, rand

    spark = SparkSession.builder.master("local[2]").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows = spark.range(20_000).select(array(*(rand(i) for i in range(3))).alias("x"))
    rows = rows.withColumn("y", expr("2 * x[0] - x[1] + 0.5 * x[2] + 3"))
    fitted = tr.launch(fit, ranks=2, framework="mpi", data={"train": rows})
    print("coefficients and intercept:", np.round(fitted[0], 3))
    assert np.allclose(fitted, [2, -1, 0.5, 3])
    spark.stop()


if __name__ == "__main__":
    main()
