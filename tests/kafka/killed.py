"""The driver of tests/servers/test_stream_killed.py: events from Kafka, scored, to Kafka and to Delta at once.

killed.py ADDRESS FOLDER JARS       until each event is in both; the test kills this process, and its executors
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr

KAFKA = "kafka.bootstrap.servers"


def main(address: str, folder: str, jars: str) -> None:
    spark = (
        SparkSession.builder.master("local-cluster[2,1,512]")
        .config("spark.jars", jars)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.databricks.delta.snapshotPartitions", "1")
        .config("spark.executor.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    model = tr.load(f"{folder}/models/1", trusted=True).follow(f"{folder}/models", every=1, trusted=True)
    events = (
        spark.readStream.format("kafka")
        .option(KAFKA, address)
        .option("subscribe", "events")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 40)
        .load()
        .withColumn("event", F.from_json(F.col("value").cast("string"), "id long, a double, b double"))
        .select("key", "topic", "partition", "offset", "event.*")
    )
    source = [
        F.struct(F.lit(f"source.{name}").alias("key"), F.col(name).cast("string").cast("binary").alias("value"))
        for name in ("topic", "partition", "offset")
    ]
    value = F.to_json(F.struct("id", "prediction", "model_version"))
    to_kafka = model.transform(events).select("key", value.alias("value"), F.array(*source).alias("headers"))
    queries = [
        to_kafka.writeStream.format("kafka")
        .option(KAFKA, address)
        .option("topic", "enriched")
        .option("checkpointLocation", f"{folder}/to-kafka")
        .trigger(availableNow=True)
        .start(),
        model.transform(events)
        .writeStream.format("delta")
        .option("checkpointLocation", f"{folder}/to-delta")
        .trigger(availableNow=True)
        .start(f"{folder}/delta"),
    ]
    for query in queries:
        query.awaitTermination()
    Path(folder, "done").touch()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
