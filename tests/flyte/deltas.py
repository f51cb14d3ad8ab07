"""A workflow for tests over versions of a Delta table."""

import os

import flyte

from tritium.flyte import Spark, Table, cache, session

CONF = {
    "spark.jars": os.environ["DELTA_JARS"],
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.retentionDurationCheck.enabled": False,
    "spark.databricks.delta.snapshotPartitions": 1,
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.log.level": "ERROR",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": 2,
}
env = flyte.TaskEnvironment("delta", plugin_config=Spark(CONF), cache=cache())
plain_env = flyte.TaskEnvironment("plain", cache=cache())


@env.task(cache="disable")
def write(uri: str, first: int, count: int, mode: str) -> int:
    """Write numbers to the table."""
    session().range(first, first + count).write.format("delta").mode(mode).save(uri)
    return count


@env.task(cache="disable")
def vacuum(uri: str) -> int:
    """Delete the files of earlier versions."""
    session().sql(f"VACUUM delta.`{uri}` RETAIN 0 HOURS")
    return 0


@env.task
def total(table: Table) -> int:
    """Return the sum of the numbers."""
    return table.read().groupBy().sum("id").first()[0]


@env.task(cache="disable")
def total_again(table: Table) -> int:
    """Return the same, whatever the cache has."""
    return table.read().groupBy().sum("id").first()[0]


@env.task
def rewritten(numbers: list[int], partitions: int, maps: bool) -> Table:
    """Return a table of these numbers."""
    rows = session().createDataFrame([(number, {"a": number}) for number in numbers], "id long, m map<string, long>")
    return Table.written((rows if maps else rows.drop("m")).repartition(partitions))


@env.task(cache="disable")
def delete(table: Table) -> int:
    """Delete the table's place."""
    import shutil

    shutil.rmtree(table.uri)
    return 0


@plain_env.task
async def of_rows(numbers: list[int], partitions: int) -> int:
    """Return the sum of numbers through a table."""
    return await total.aio(await rewritten.aio(numbers, partitions, False))


@plain_env.task(cache="disable")
async def of_deleted(numbers: list[int]) -> int:
    """Delete a table that the cache still names, then read it."""
    await delete.aio(await rewritten.aio(numbers, 1, True))
    return await total.aio(await rewritten.aio(numbers, 1, True))
