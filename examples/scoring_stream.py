"""Score a stream of sensor readings as they come, with a model that was trained on two ranks.

Data: readings of pumps, made here. A pump vibrates more the faster it turns, and a faulty one more than it should.
"""

import os
import sys
import tempfile

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one

import torch
from matplotlib.figure import Figure
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tritium.ml import TorchEstimator

SMALL = "EXAMPLE_SMALL" in os.environ  # the tests' size
TRAINED, FILES, READINGS = (4_000, 2, 500) if SMALL else (40_000, 10, 2_000)  # readings in each file


def readings(numbers):
    """Return a reading for each `value`: speed and vibration, and whether the pump is faulty."""

    def uniform(key):
        return F.pmod(F.xxhash64("value", F.lit(key)), F.lit(1_000_003)) / 1_000_003

    faulty = (uniform(1) < 0.1).cast("int")
    noise = 0.15 * (uniform(2) + uniform(3) + uniform(4) - 1.5)
    vibration = 0.2 + F.col("speed") ** 2 + 0.3 * faulty + noise
    return numbers.withColumn("speed", uniform(5)).withColumns({"faulty": faulty, "vibration": vibration})


def f1(scored):
    """Return the harmonic mean of the share of alarms that are right and the share of faults that are found."""
    evaluator = MulticlassClassificationEvaluator(labelCol="faulty", metricName="fMeasureByLabel", metricLabel=1.0)
    return evaluator.evaluate(scored)


def threshold(history):
    """Return the vibration above which an alarm is best, by the history: the baseline."""
    alarms = {
        level: f1(history.withColumn("prediction", (F.col("vibration") > level).cast("double")))
        for level in (0.4, 0.6, 0.8, 1.0, 1.2)
    }
    return max(alarms, key=alarms.get)


def main():
    spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    history = readings(spark.range(10**9, 10**9 + TRAINED).withColumnRenamed("id", "value")).cache()
    model = TorchEstimator(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.SiLU(), torch.nn.Linear(32, 2)),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda weights: torch.optim.Adam(weights, lr=0.02),
        feature_cols=["speed", "vibration"],
        label_cols="faulty",
        normalize=True,
        batch_size=256,
        epochs=10,
        ranks=2,
    ).fit(history)

    with tempfile.TemporaryDirectory() as folder:
        events = readings(spark.readStream.schema("value long").option("maxFilesPerTrigger", 1).parquet(folder))
        scores = model.transform(events).drop("rawPrediction")
        query = scores.writeStream.format("memory").queryName("scored").start()  # a table: or Kafka, files, Delta, …
        for number in range(FILES):  # the sensors write while the query runs
            numbers = spark.range(number * READINGS, (number + 1) * READINGS, numPartitions=1)
            numbers.withColumnRenamed("id", "value").write.mode("append").parquet(folder)
        query.processAllAvailable()
        query.stop()

    scored, level = spark.table("scored").cache(), threshold(history)
    by_level = scored.withColumn("prediction", (F.col("vibration") > level).cast("double"))
    batches = sum(batch.numInputRows > 0 for batch in query.recentProgress)
    print(f"{scored.count():,} readings scored in {batches} micro-batches, while they came")
    print(f"alarm above a vibration of {level}: F1 {f1(by_level):.3f}")
    print(f"network over speed and vibration: F1 {f1(scored):.3f}")
    assert f1(scored) > f1(by_level) + 0.1

    some = scored.limit(600).toPandas()
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    titles = {"prediction": "Alarms of the model", "faulty": "Pumps that are faulty"}
    for axes, (column, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        axes.scatter(some.speed, some.vibration, c=some[column], cmap="coolwarm", s=6, antialiased=False)
        axes.axhline(level, color="grey", linestyle="--")
        axes.set(title=title, xlabel="speed", ylabel="vibration (dashed: the threshold)")
    figure.savefig("scoring_stream.png", dpi=100)
    print("picture: scoring_stream.png")
    spark.stop()


if __name__ == "__main__":
    main()
