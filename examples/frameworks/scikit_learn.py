"""Train a scikit-learn model on a DataFrame with two ranks: `partial_fit`, and coefficients averaged every epoch."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr


def train(epochs):
    from sklearn.linear_model import SGDClassifier

    world = tr.world()
    model = SGDClassifier(loss="log_loss", random_state=0)
    for epoch in world.shard("train").epochs(epochs, batch_size=64, device=None):
        for batch in epoch:
            if batch.rows:
                model.partial_fit(batch["x"], batch["y"], classes=[0, 1])
        every = world.gather((model.coef_, model.intercept_))
        model.coef_ = np.mean([coefficients for coefficients, _ in every], axis=0)
        model.intercept_ = np.mean([intercept for _, intercept in every], axis=0)
    return model


def main():
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    numbers = spark.range(2000).select((F.rand(1) * 2 - 1).alias("a"), (F.rand(2) * 2 - 1).alias("b"))
    df = numbers.select(F.array("a", "b").alias("x"), F.expr("cast(a + 2 * b > 0.2 as int)").alias("y"))
    one, other = tr.launch(train, ranks=2, args=(5,), data={"train": df}, spark=spark)
    points = np.random.default_rng(0).uniform(-1, 1, (1000, 2))
    right = (one.predict(points) == (points @ [1, 2] > 0.2)).mean()
    print(f"{right:.1%} right")
    assert right > 0.95
    assert (one.coef_ == other.coef_).all()
    spark.stop()


if __name__ == "__main__":
    main()
