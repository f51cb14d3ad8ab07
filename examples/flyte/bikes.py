"""Bike sharing as a Flyte workflow: Spark prepares rows, a gang trains on them, Spark scores; each step is cached.

    python bikes.py ../bike-sharing/hour.csv --epochs 3

Runs in this process, without a backend of Flyte's. The second time, every step comes from the cache, and no JVM starts.
"""

import argparse
import os
import time

os.environ.setdefault("DO_NOT_TRACK", "1")  # Flyte's client reports errors to its makers otherwise

import flyte
import torch
from flyte.io import File
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.sql import functions as F

import tritium as tr
from tritium.flyte import Gang, SavedModel, Spark, Table, cache, run_dir, session
from tritium.ml import TorchEstimator, TorchModel

CONF = {"spark.sql.shuffle.partitions": 2, "spark.ui.enabled": False, "spark.log.level": "ERROR"}
spark_env = flyte.TaskEnvironment("spark", plugin_config=Spark(CONF), cache=cache())
gang_env = flyte.TaskEnvironment("gang", plugin_config=Gang(ranks=2, spark=Spark(CONF)), cache=cache())
workflow = flyte.TaskEnvironment("bikes", depends_on=[spark_env, gang_env])

FEATURES = ["temp", "hum", "windspeed", "workingday", "sin", "cos"]


def prepared(hours):
    """Return the features, and the logarithm of one more than the bikes."""
    angle = 2 * F.pi() * F.col("hr") / 24
    return hours.withColumns({"log_cnt": F.log1p("cnt"), "sin": F.sin(angle), "cos": F.cos(angle)})


@spark_env.task
def etl(csv: File) -> tuple[Table, Table]:
    """Return the hours to train on, and a fifth that is held out."""
    hours = prepared(session().read.csv(csv.path, header=True, inferSchema=True))
    held_out = F.pmod(F.xxhash64("instant"), F.lit(5)) == 0
    return Table.written(hours.filter(~held_out)), Table.written(hours.filter(held_out))


@gang_env.task(retries=2)
def mean(rows: Table, batch_size: int) -> float:
    """Return the mean of the label: on every rank, `rows` is its shard; the value of rank 0 is the task's."""
    batches = [batch["log_cnt"] for epoch in rows.epochs(1, batch_size=batch_size) for batch in epoch]
    sums = tr.world().gather((sum(float(labels.sum()) for labels in batches), sum(map(len, batches))))
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


@spark_env.task(retries=2)
def train(rows: Table, epochs: int) -> SavedModel:
    """Train on two ranks. The next attempt goes on from the newest checkpoint in `run_dir()`."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(len(FEATURES), 32), torch.nn.SiLU(), torch.nn.Linear(32, 1)]
    estimator = TorchEstimator(
        model=torch.nn.Sequential(*layers),
        loss=torch.nn.MSELoss(),
        optimizer=lambda weights: torch.optim.Adam(weights, lr=5e-3),
        feature_cols=FEATURES,
        label_cols=["log_cnt"],
        epochs=epochs,
        batch_size=64,
        ranks=2,
        run_dir=run_dir(),
    )
    return SavedModel.of(estimator.fit(rows.read()))


@spark_env.task
def score(rows: Table, model: SavedModel, baseline: float) -> dict[str, float]:
    """Return the error of the model on the hours held out, and that of the mean."""
    scored = TorchModel(model.load(trusted=True)).transform(rows.read())
    scored = scored.withColumn("mean", F.lit(baseline)).cache()
    errors = {
        column: RegressionEvaluator(labelCol="log_cnt", predictionCol=column).evaluate(scored)
        for column in ("prediction", "mean")
    }
    scored.unpersist()
    return errors


@workflow.task
async def bikes(csv: File, epochs: int) -> dict[str, float]:
    """The whole: this function sees tables and models by reference, and needs neither Spark nor a GPU."""
    rows, held_out = await etl.aio(csv)
    model = await train.aio(rows, epochs)
    return await score.aio(held_out, model, await mean.aio(rows, 256))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", help="the file hour.csv")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    flyte.init(local_persistence=True)  # keeps which steps came from the cache: ~/.flyte/local-cache/cache.db
    began = time.monotonic()
    csv = File.from_local_sync(options.csv)
    run = flyte.run(bikes, csv, options.epochs)
    print(run.outputs(), f"{time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
