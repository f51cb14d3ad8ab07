"""What the topic and the Delta table hold, as JSON: read_all.py ADDRESS FOLDER JARS"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def main(address: str, folder: str, jars: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", jars)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    headers = F.map_from_entries("headers")
    records = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", "enriched")
        .option("includeHeaders", "true")
        .load()
        .select(
            F.from_json(F.col("value").cast("string"), "id long, prediction double, model_version long").alias("event"),
            F.struct(*(headers[f"source.{name}"].cast("string") for name in ("topic", "partition", "offset"))).alias(
                "at"
            ),
        )
    )
    rows = spark.read.format("delta").load(f"{folder}/delta")
    written = {
        "written": records.count(),
        "once": [row.id for row in records.dropDuplicates(["at"]).select("event.id").collect()],
        "delta": [row.id for row in rows.select("id").collect()],
        "predictions": [[row.id, row.prediction] for row in rows.select("id", "prediction").collect()],
    }
    Path(folder, "read.json").write_text(json.dumps(written))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
