"""A streaming query from Kafka to Kafka that runs until it is told to stop: stream_query.py ADDRESS JARS FOLDER MODEL

MODEL is `nothing` (a constant takes the model's place), `zeros` (a UDF that does nothing), `tritium` or `batch_udf`.
The next micro-batch begins as soon as one has ended. Says "ready" when the first one is through, and stops at the end
of its standard input.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import score_batch_udf
import score_ideal
import score_tritium
import work
from pyspark.sql import functions as F


def nothing(frame: Any) -> Any:
    return frame.withColumn("prediction", F.lit(0.0))


MODELS = {
    "nothing": nothing,
    "zeros": score_ideal.zeros,
    "tritium": score_tritium.transform,
    "batch_udf": score_batch_udf.transform,
}


def main(address: str, jars: str, folder: str, model: str) -> int:
    work.prepare()
    spark = work.session(**{"spark.jars": ",".join(map(str, sorted(Path(jars).glob("*.jar"))))})
    events = spark.readStream.format("kafka").option("kafka.bootstrap.servers", address).option("subscribe", "events")
    came = F.from_json(F.col("value").cast("string"), "id long, features array<float>").alias("event")
    rows = (
        events.option("startingOffsets", "earliest").load().select("key", F.unix_millis("timestamp").alias("at"), came)
    )
    scored = MODELS[model](rows.select("key", "at", "event.*"))
    value = F.to_json(F.struct("id", "prediction", F.col("at").alias("appended")))
    query = (
        scored.select("key", value.alias("value"))
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("topic", "scored")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .start()
    )
    while query.lastProgress is None or query.lastProgress["numInputRows"] == 0:
        if query.exception() is not None:
            raise query.exception()
        time.sleep(0.05)  # a listener would be told a moment later
    print("ready", flush=True)
    sys.stdin.read()
    query.stop()
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
