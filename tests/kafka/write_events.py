"""So many events with the numbers a (its own) and b (1): write_events.py ADDRESS EVENTS JARS"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def main(address: str, events: str, jars: str) -> None:
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.jars", jars)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    value = F.to_json(F.struct("id", F.col("id").cast("double").alias("a"), F.lit(1.0).alias("b")))
    rows = spark.range(int(events)).select(F.col("id").cast("string").alias("key"), value.alias("value"))
    rows.write.format("kafka").option("kafka.bootstrap.servers", address).option("topic", "events").save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
