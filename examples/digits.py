"""Read handwritten digits: images as bytes in a column, a small convolutional network of Keras, two ranks.

Data: scikit-learn's digits, 1,797 scans of 8 × 8 pixels. KERAS_BACKEND chooses torch, jax or tensorflow.
"""

import io
import os
import sys

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one
os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from tritium.ml import KerasEstimator

SMALL = "EXAMPLE_SMALL" in os.environ  # the tests' size


def to_png(pixels):
    """Return the bytes of an image file."""
    file = io.BytesIO()
    Image.fromarray((pixels * 15).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def from_png(content):
    """Return an image as an array [height, width, channels] of 0 to 1."""
    return np.asarray(Image.open(io.BytesIO(content)), np.float32)[..., None] / 255


def make_model():
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )


def guess_by_mean(train, test):
    """Return the share that is right where a digit is the one whose mean image is nearest: the baseline."""
    images = {name: np.stack([from_png(content).ravel() for content in rows.image]) for name, rows in (train, test)}
    digits = {name: rows.digit.to_numpy() for name, rows in (train, test)}
    means = np.stack([images["train"][digits["train"] == digit].mean(0) for digit in range(10)])
    nearest = ((images["test"][:, None] - means) ** 2).sum(2).argmin(1)
    return (nearest == digits["test"]).mean()


def draw(wrong, errors):
    """Draw the curve of the validation, and scans that were misread."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.2))
    axes = left.subplots()
    axes.plot(range(1, len(errors) + 1), errors, color="teal")
    axes.set(title="Validation", xlabel="epoch", ylabel="digits misread", ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:.0%}")
    right.suptitle("Misread scans")
    for row, axes in zip(wrong.head(8).itertuples(), right.subplots(2, 4).flat, strict=False):
        axes.imshow(from_png(row.image), cmap="gray_r")
        axes.set_title(f"{row.digit} read as {row.prediction:.0f}", fontsize=8)
    for axes in right.axes:
        axes.axis("off")
    figure.savefig("digits.png", dpi=100)
    print("picture: digits.png")


def main():
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    digits = load_digits()
    table = pd.DataFrame({"image": map(to_png, digits.images), "digit": digits.target})
    train, test = spark.createDataFrame(table).randomSplit([0.8, 0.2], seed=1)
    model = KerasEstimator(
        model=make_model,
        optimizer=keras.optimizers.Adam(0.005),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        feature_cols="image",
        label_cols="digit",
        decode={"image": from_png},  # in the ranks, and in the executors that predict
        validation=0.1,
        epochs=4 if SMALL else 25,
        ranks=2,
    ).fit(train)

    scored = model.transform(test)
    accuracy = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy").evaluate(scored)
    baseline = guess_by_mean(("train", train.toPandas()), ("test", test.toPandas()))
    print(f"nearest mean image: {baseline:.1%} of the held-out digits are read right")
    print(f"network on two ranks: {accuracy:.1%}")
    assert accuracy > (0.8 if SMALL else baseline)
    draw(scored.where("digit != prediction").toPandas(), [1 - epoch["validation_accuracy"] for epoch in model.history])
    spark.stop()


if __name__ == "__main__":
    main()
