"""Two streaming queries on one machine: one trains on and publishes, the other scores with the newest version."""

import os
import sys
import threading
from pathlib import Path

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr

VERSIONS = 2 if os.environ.get("EXAMPLE_SMALL") else 8
LOOP = Path("closed-loop")
CHECKPOINT = LOOP / "training.pt"
enough = threading.Event()


def train(saved):
    """Take one pass over the rows of a micro-batch, from the weights and the optimizer of the pass before."""
    shard = tr.world().shard("train")
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    if saved:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in shard.epochs(1, batch_size=32):
        for batch in epoch:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(batch["features"]), batch["y"][:, None]).backward()
            optimizer.step()
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    return tr.Model(net, example=shard, inputs=["features"]), state


def train_on(rows, number):
    """Do what the training query does with a micro-batch: train, save, publish."""
    if rows.isEmpty() or enough.is_set():
        return
    saved = torch.load(CHECKPOINT) if CHECKPOINT.exists() else None
    data = tr.Data(rows, columns={"features": ["a", "b"], "y": "y"})
    model, state = tr.launch(train, args=(saved,), data={"train": data}, ranks=1)[0]
    torch.save(state, CHECKPOINT.with_suffix(".part"))
    CHECKPOINT.with_suffix(".part").rename(CHECKPOINT)
    version = tr.publish(model, str(LOOP / "models"))
    print(f"version {version} is published, trained on micro-batch {number}", flush=True)


def numbers(frame):
    """Return two features and a label for each number in the column `value`."""
    frame = frame.withColumns({"a": F.sin("value"), "b": F.cos(F.col("value") * 7)})
    return frame.withColumn("y", 3 * F.col("a") - 2 * F.col("b") + 1)


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[3]").config("spark.sql.shuffle.partitions", 2).getOrCreate()
    LOOP.mkdir(exist_ok=True)
    train_on(numbers(spark.range(32).withColumnRenamed("id", "value")), 0)
    rates = {"rowsPerSecond": 100, "numPartitions": 1}
    events = numbers(spark.readStream.format("rate").options(**rates).load())

    training = events.writeStream.foreachBatch(train_on).trigger(processingTime="2 seconds")
    training = training.option("checkpointLocation", str(LOOP / "train")).start()

    model = tr.load(str(LOOP / "models" / "1"), trusted=True).follow(str(LOOP / "models"), every="1s", trusted=True)
    error = F.abs(F.col("prediction") - F.col("y")).alias("error")
    scoring = model.transform(events).select("model_version", error).writeStream.format("parquet")
    scoring = scoring.option("checkpointLocation", str(LOOP / "score")).start(str(LOOP / "scored"))

    scored = spark.read.schema("model_version long, error double").parquet(str(LOOP / "scored"))
    while len(errors := scored.groupBy("model_version").avg("error").orderBy("model_version").collect()) < VERSIONS:
        for query in (training, scoring):
            if query.awaitTermination(1):  # It raises the query's error.
                raise SystemExit(f"{query.id} has ended")
        scored = spark.read.schema(scored.schema).parquet(str(LOOP / "scored"))
    for row in errors:
        print(f"version {row['model_version']}: mean error {row['avg(error)']:.3f}")
    enough.set()
    while training.status["isTriggerActive"]:  # A training is not interrupted.
        training.awaitTermination(1)
    for query in (training, scoring):
        query.stop()
    model.stop_following()
    assert errors[-1]["avg(error)"] < errors[0]["avg(error)"]
    spark.stop()
