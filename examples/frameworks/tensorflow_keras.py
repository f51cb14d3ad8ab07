"""Train a tf_keras model on a DataFrame with `model.fit`: two ranks, MultiWorkerMirroredStrategy."""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

import tritium as tr


def train(epochs):
    import tensorflow as tf
    import tf_keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(32, "relu"), tf_keras.layers.Dense(1)])
        model.compile(tf_keras.optimizers.Adam(1e-2), "mse")

    rows = tr.world().shard("train").tensorflow(batch_size=64, columns=("x", "y"))
    history = model.fit(rows, epochs=epochs, verbose=0)
    return history.history["loss"], model.get_weights()  # the same on every rank


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    rows = spark.range(2000).selectExpr("array(sin(id), cos(id)) as x", "2 * sin(id) - cos(id) + 0.5 as y")

    (losses, weights), (others, _) = tr.launch(train, ranks=2, framework="tensorflow", data={"train": rows}, args=(5,))
    print(f"loss {losses[-1]:.4f}", [list(weight.shape) for weight in weights])
    assert losses == others
    assert losses[-1] < 0.05
