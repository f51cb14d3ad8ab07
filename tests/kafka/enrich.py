"""The driver of the Kafka test: events in, enriched events out. It is killed once and started again.

enrich.py ADDRESS FOLDER JARS produce    write the events, then run the query (until it is killed)
enrich.py ADDRESS FOLDER JARS finish     run the query to its end, then write down what the topic holds
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import tritium as tr
from tritium.ml import TorchModel

EVENTS = 40


def main(address: str, folder: str, jars: str, step: str) -> None:
    spark = (
        SparkSession.builder.master("local[1]")  # one task after the other: partition 0 is written when 1 is stuck
        .config("spark.jars", ",".join(map(str, sorted(Path(jars).glob("*.jar")))))
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    if step == "produce":
        produce(spark, address)
    query = (
        enrich(spark, address, TorchModel(tr.load(f"{folder}/model", trusted=True)))
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("topic", "enriched")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    records = written(spark, address).cache()
    records.write.json(f"{folder}/written")
    once(records).write.json(f"{folder}/once")
    spark.stop()


def produce(spark: SparkSession, address: str) -> None:
    event = F.to_json(F.struct("id", (F.col("id") / 10).alias("a"), F.sin("id").alias("b")))
    events = spark.range(EVENTS).select(
        F.concat(F.lit("key-"), "id").alias("key"),
        event.alias("value"),
        F.when(F.col("id") < EVENTS // 2, 0).otherwise(1).alias("partition"),
    )
    events.write.format("kafka").option("kafka.bootstrap.servers", address).option("topic", "events").save()


def enrich(spark: SparkSession, address: str, model: TorchModel) -> DataFrame:
    """Return each event with its prediction and key; headers hold its source, which identifies duplicates."""
    events = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", "events")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 30)
        .load()
    )
    parsed = events.withColumn("event", F.from_json(F.col("value").cast("string"), "id long, a double, b double"))
    scored = model.transform(parsed.select("key", "topic", "partition", "offset", "event.*"))
    source = [
        F.struct(F.lit(f"source.{name}").alias("key"), F.col(name).cast("string").cast("binary").alias("value"))
        for name in ("topic", "partition", "offset")
    ]
    value = F.to_json(F.struct("id", "a", "b", "prediction"))
    return scored.select("key", value.alias("value"), F.array(*source).alias("headers"))


def written(spark: SparkSession, address: str) -> DataFrame:
    """Return every record of the topic, with its headers as columns."""
    records = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", "enriched")
        .option("includeHeaders", "true")
        .load()
    )
    headers = F.map_from_entries("headers")
    columns = [headers[f"source.{name}"].cast("string").alias(name) for name in ("topic", "partition", "offset")]
    return records.select(F.col("key").cast("string"), F.col("value").cast("string"), *columns)


def once(records: DataFrame) -> DataFrame:
    """Return the events without duplicates: one per position of the source topic."""
    return records.dropDuplicates(["topic", "partition", "offset"])


if __name__ == "__main__":
    main(*sys.argv[1:])
