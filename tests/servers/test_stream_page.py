"""The page on streams runs as it is written: on a real Kafka broker, Delta, and a real PostgreSQL server."""

# ruff: noqa: E501 - the programs between the blocks of the page

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import advice
from broker import broker, jars
from postgres import execute, postgres

PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "stream.md"
# What stands between the page's blocks here: what the reader sees, as assertions.
BEGIN = """
import json, os, time
from tritium.predict import following
following.GRACE = 0.2

def written(frame):
    rows = [json.loads(row[0]) for row in frame.select(F.col("value").cast("string")).collect()]
    return sorted(rows, key=lambda row: row.get("id", 9))
"""
AFTER = {
    "once = (": """
first, second, third = written(once)
assert first == {"id": 1, "prediction": 6.0, "model_version": 1}, first
assert "column 'hum' is null" in second["prediction_error"] and second["id"] == 2, second
assert "is null" in third["prediction_error"] and "id" not in third, third
found = once.select(F.col("key").cast("string"), F.map_keys(headers).alias("names")).collect()
assert sorted(row.key for row in found) == ["key-0", "key-1", "key-2"]
assert found[0].names == ["source.topic", "source.partition", "source.offset"]
""",
    "make_model(100)": """
def send(number):
    event = json.dumps({"id": number, "temp": 1, "hum": 2, "hr": 3})
    header = F.expr("array(struct('trace' AS key, binary('abc') AS value)) AS headers")
    frame = spark.createDataFrame([(f"key-{number}", event)], "key string, value string").select("*", header)
    frame.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", "events").option(
        "includeHeaders", "true").save()

number = 3
while True:
    send(number)
    query.processAllAvailable()
    last = max(written(once), key=lambda row: row.get("id", 0))
    assert last["id"] == number
    if last["model_version"] == 2:
        break
    assert last == {"id": number, "prediction": 6.0, "model_version": 1} and number < 60
    number += 1
assert last == {"id": number, "prediction": 106.0, "model_version": 2}, last
kept_header = once.where(F.col("key").cast("string") == f"key-{number}").select(headers["trace"].cast("string")).collect()
assert kept_header[0][0] == "abc"

from pyspark.sql.avro.functions import to_avro
record = '''{"type": "record", "name": "event", "fields": [{"name": "id", "type": "long"}, {"name": "temp", "type": "double"},
  {"name": "hum", "type": ["null", "double"]}, {"name": "hr", "type": "double"}]}'''
rows = spark.createDataFrame([("key-1", 1, 1.0, 2.0, 3.0), ("key-2", 2, 1.0, None, 3.0)],
    "key string, id long, temp double, hum double, hr double").select(
    "key", F.struct(F.col("id"), "temp", "hum", "hr").alias("event"))
rows = rows.select("key", to_avro("event", record).alias("value"))
rows.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", "avro-events").save()
metrics_of_page = [p for p in query.recentProgress if p["numInputRows"]][-1]["observedMetrics"]["bikes"].asDict()
""",
    "avro_query = (": """
avro_query.processAllAvailable()
avro_query.stop()
back = (spark.read.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", "avro-enriched").load()
    .select(F.col("key").cast("string"), from_avro("value", '{"type": "record", "name": "topLevelRecord", "fields": [{"name": "id", "type": ["long", "null"]}, '
    '{"name": "prediction", "type": ["double", "null"]}]}').alias("s")).orderBy("key").collect())
assert [(row.key, row.s.id, row.s.prediction) for row in back] == [("key-1", 1, 6.0), ("key-2", 2, None)], back
""",
    "to_delta = (": """
to_delta.stop()
table = spark.read.format("delta").load("tables/scored")
assert table.count() == number + 1 == table.select("topic", "partition", "offset").distinct().count()
appended = changes.writeStream.format("memory").queryName("appended").trigger(availableNow=True).start()
appended.awaitTermination()
assert spark.table("appended").count() == number + 1
""",
    "rides = (": """
assert rides.rdd.getNumPartitions() == 8
assert spark.read.format("jdbc").options(**database).option("dbtable", "scored_rides").load().agg(
    F.count("*"), F.sum("prediction")).collect()[0] == (1000, 499500.0 + 2000)
""",
    "def write(batch": """
to_postgres.processAllAvailable()
to_postgres.stop()
stored = spark.read.format("jdbc").options(**database).option("dbtable", "scored").load()
assert stored.count() == number + 1
# A second call for a micro-batch, of which the first has written half, writes the rest.
execute(f"DELETE FROM scored WHERE \\"offset\\" % 2 = 0")
again = stored.count()
for half in [row.batch for row in stored.select("batch").distinct().collect()]:
    write(spark.read.format("delta").load("tables/scored"), half)
assert again < number + 1 == stored.count(), (again, stored.count())
""",
    "observedMetrics": """
assert set(metrics_of_page) == {"rows", "model_ms_p50", "model_ms_p99", "model_rows_per_second", "model_version", "bad_rows"}
assert metrics_of_page["model_version"] == 2 and metrics_of_page["model_ms_p99"] > 0
from tritium.gang.driver.told import told
from tritium.ui.runs import Runs
(row,) = Runs(["runs"], told).rows()
on_page = Runs(["runs"], told).get(row["key"]).whole()
assert row["status"] == "running" and on_page["scored"][-1]["model version"] == 2, on_page["scored"]
assert on_page["scored"][-1]["bad rows"] == 3 * 2, on_page["scored"]  # of three queries of this DataFrame
""",
    "class Slow": """
query.stop()
refusals = {}
for name in ("model", "nothing"):
    frame = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", "events").load()
    frame = frame.selectExpr("value", "1d AS temp", "1d AS hum", "1d AS hr")
    if name == "model":
        frame = model.transform(frame).selectExpr("cast(prediction AS string) AS value")
    real = (frame.select("value").writeStream.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", "real")
        .outputMode("update").option("checkpointLocation", f"checkpoints/real-{name}").trigger(realTime="5 seconds").start())
    try:
        real.awaitTermination(8)
    except Exception as error:
        refusals[name] = str(error)
    real.stop()
assert list(refusals) == ["model"], refusals
for words in ("OPERATOR_OR_SINK_NOT_IN_ALLOWLIST", "ArrowEvalPythonExec is not in the operator allowlist for Real-Time Mode"):
    assert words in refusals["model"], refusals
spark.stop()
print("done")
""",
}
PLACES = {
    '"localhost:9092"': "{kafka!r}",
    'metrics="bikes"': 'metrics="bikes", run_dir="runs/bikes"',
    'every="30s"': 'every="1s"',
    "jdbc:postgresql://localhost/bikes": "jdbc:postgresql://{postgres}/bikes",
    "1_000_000": "1000",
    '.config("spark.jars.packages", packages)': "{settings}",  # of the versions that can be had here
}
SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
}


def program(address: str, database: str) -> str:
    paths = [
        str(jar) for profile in ("connector", "avro", "delta", "postgresql") for jar in jars(profile).glob("*.jar")
    ]
    settings = {**SETTINGS, "spark.jars": ",".join(paths)}
    here = {"kafka": address, "postgres": database}
    here["settings"] = "".join(f".config({name!r}, {value!r})" for name, value in settings.items())
    asked = dict(AFTER)
    parts = [BEGIN]
    for _, code in advice.blocks(PAGE, "python"):
        for place, here_text in PLACES.items():
            code = code.replace(place, here_text.format(**here))
        following = next((word for word in asked if word in code), None)
        parts += [code, asked.pop(following) if following else ""]
    assert not asked, f"the page has no block with {list(asked)}"
    return "\n".join(parts)


@pytest.mark.kafka
@pytest.mark.timeout(400)
def test_the_page_runs_as_it_is_written(tmp_path: Path) -> None:
    (schema,) = (code for _, code in advice.blocks(PAGE, "sql"))
    with postgres() as database, broker() as address:
        execute(database, schema)
        rides = "SELECT id, id::float8 AS temp, 1::float8 AS hum, 1::float8 AS hr FROM generate_series(0, 999) AS id"
        execute(database, f"CREATE TABLE rides AS {rides}")
        helper = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import postgres

def execute(sql):
    postgres.execute({database!r}, sql)
"""
        (tmp_path / "page.py").write_text(helper + program(address, database))
        done = subprocess.run(
            [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False
        )
        print(done.stdout[-3000:])
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]
