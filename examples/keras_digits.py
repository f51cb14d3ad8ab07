"""Classify scikit-learn's images of digits with KerasEstimator on two ranks, and score them as a batch of Spark's.

KERAS_BACKEND chooses torch, jax or tensorflow.
"""

import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from tritium.ml import KerasEstimator


def make_model():
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((64,)),
            layers.Rescaling(1 / 16),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main():
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    digits = load_digits()
    rows = [(pixels.tolist(), int(digit)) for pixels, digit in zip(digits.data, digits.target, strict=True)]
    train, test = spark.createDataFrame(rows, "pixels array<double>, digit int").randomSplit([0.8, 0.2], seed=1)
    model = KerasEstimator(
        model=make_model,
        optimizer=keras.optimizers.Adam(0.005),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        feature_cols="pixels",
        label_cols="digit",
        validation=0.1,
        epochs=8,
        ranks=2,
    ).fit(train)
    scored = model.transform(test)
    right = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy").evaluate(scored)
    print(f"{right:.1%} right")
    assert right > 0.9
    spark.stop()


if __name__ == "__main__":
    main()
