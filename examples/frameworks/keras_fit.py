"""Train a Keras model on a DataFrame with two ranks. KERAS_BACKEND chooses torch, jax or tensorflow."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr


def train(epochs):
    import keras

    rows = tr.world().shard("train").keras(batch_size=64, x="x", y="y")
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.02), "mse")
    history = model.fit(rows, epochs=epochs)
    return history.history["loss"], model.get_weights()


def main():
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    numbers = spark.range(2000).select((F.rand(1) * 2 - 1).alias("a"), (F.rand(2) * 2 - 1).alias("b"))
    df = numbers.select(F.array("a", "b").alias("x"), F.expr("a * b + a").alias("y"))
    framework = tr.Keras(backend=os.environ.get("KERAS_BACKEND", "torch"))
    (loss, weights), (other_loss, other_weights) = tr.launch(
        train, ranks=2, args=(20,), data={"train": df}, framework=framework, spark=spark
    )
    print(f"loss {loss[0]:.4f} → {loss[-1]:.4f}")
    assert loss[-1] < 0.05
    assert loss == other_loss
    assert all((mine == theirs).all() for mine, theirs in zip(weights, other_weights, strict=True))
    spark.stop()


if __name__ == "__main__":
    main()
