"""A workflow for tests: a table, a gang over it, what goes wrong in one."""

import os
import signal
import sys
from pathlib import Path

import flyte

import tritium as tr
from tritium.flyte import Gang, SavedModel, Spark, Table, cache, run_dir, session

CONF = {
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.log.level": "ERROR",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": 3,
}
spark_env = flyte.TaskEnvironment("spark", plugin_config=Spark(CONF), cache=cache())
gang_env = flyte.TaskEnvironment("gang", plugin_config=Gang(ranks=2, spark=Spark(CONF), progress=False), cache=cache())
once_env = flyte.TaskEnvironment("once", plugin_config=Gang(ranks=2, spark=Spark(CONF), retries=0, progress=False))
three_env = flyte.TaskEnvironment("three", plugin_config=Gang(ranks=3, spark=Spark(CONF), progress=False))
plain_env = flyte.TaskEnvironment("plain", depends_on=[spark_env, gang_env])


@spark_env.task
def rows(count: int, partitions: int) -> Table:
    """Return the numbers below `count`, as x, twice."""
    numbers = session().range(0, count, 1, partitions).selectExpr("id", "double(id) x")
    return Table.written(numbers)


@gang_env.task
def total(rows: Table, batch_size: int = 4, *, factor: float = 1.0) -> dict[str, float]:
    """Return the sum over all ranks, and how many there are."""
    assert "flyte" not in sys.modules
    own = sum(float(b["x"].sum()) for epoch in rows.epochs(1, batch_size=batch_size) for b in epoch)
    return {"sum": factor * sum(tr.world().gather(own)), "ranks": float(tr.world().size)}


@plain_env.task
async def whole(count: int, partitions: int) -> dict[str, float]:
    """Return what two tasks make of it; this one needs no Spark."""
    return await total.aio(await rows.aio(count, partitions), 4, factor=2.0)


@gang_env.task(cache="disable")
async def coroutine(start: int) -> int:
    """Return a number of an async function, which runs on every rank."""
    import asyncio

    await asyncio.sleep(0)
    return start + sum(tr.world().gather(tr.world().rank))


@spark_env.task(cache="disable")
def settings() -> dict[str, str]:
    """Return Spark's settings within a task."""
    conf = session().conf
    return {name: conf.get(name) for name in ("spark.sql.shuffle.partitions", "spark.master", "spark.ui.enabled")}


@gang_env.task(retries=2, cache="disable")
def divides() -> float:
    """Raise the user's own exception, on rank 1."""
    return 1 / (1 - tr.world().rank)


@once_env.task(retries=2)
def dies_once(marker: str) -> int:
    """Lose rank 1 in the first attempt: it is killed where there is no marker yet."""
    if tr.world().rank == 1 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return tr.world().size


@gang_env.task(retries=2, cache="disable")
def wants_memory() -> int:
    """Ask for more memory than any machine has."""
    return len(bytearray(1 << 62))


@spark_env.task(retries=2, cache="disable")
def refuses(text: str) -> int:
    """Raise on the driver."""
    raise ValueError(text)


@spark_env.task(retries=1, cache="disable")
def is_cut_off() -> int:
    """Raise as a store does that does not answer."""
    raise ConnectionResetError("the store does not answer")


@three_env.task(retries=1)
def needs_three() -> int:
    """Return the number of ranks, for which two slots are too few."""
    return tr.world().size


@spark_env.task(cache="disable")
def count(table: Table) -> int:
    """Return the number of rows."""
    return table.read().count()


@spark_env.task
def place() -> str:
    """Return the run directory of this task's attempts."""
    return run_dir()


@gang_env.task(cache="disable")
def loads(model: SavedModel) -> str:
    """Return, from a rank, where a model is."""
    assert "flyte" not in sys.modules
    return model.path
