"""A training for tests, with and without Flyte: what it writes down of its weights shows whether both are the same."""

import asyncio
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import fsspec
import torch

from tritium.ml import TorchEstimator

EPOCHS = 4


def rows(spark):
    """Return what is trained on."""
    return spark.range(0, 240, 1, 2).selectExpr("float(id % 17) x", "float(id % 5) y")


def has_checkpoints(run_dir):
    """Return whether there are two checkpoints: then the first of them is complete."""
    files, path = fsspec.core.url_to_fs(run_dir)
    files.invalidate_cache()
    return files.exists(f"{path}/checkpoints") and len(files.ls(f"{path}/checkpoints")) >= 2


def disturbed(loss, fault, marker, run_dir):
    """Return the loss, which does what `fault` says when there are checkpoints, and no marker yet."""

    def compute(outputs, labels):
        if fault and outputs.requires_grad and os.environ.get("RANK") == "1" and not Path(marker).exists():
            if has_checkpoints(run_dir):
                Path(marker).write_text(fault)
                FAULTS[fault]()
            time.sleep(0.2)  # A step takes a millisecond, a checkpoint 100.
        return loss(outputs, labels)

    return compute


def _parents():
    """Yield (pid, command) of the processes above this one."""
    pid = os.getpid()
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def kill_executor():
    """Kill the JVM of this rank's executor."""
    pid = next(pid for pid, command in _parents() if "CoarseGrainedExecutorBackend" in command)
    os.kill(pid, signal.SIGKILL)
    time.sleep(600)


def heap():
    """Return the option for the heap of this rank's executor."""
    command = next(command for _, command in _parents() if "CoarseGrainedExecutorBackend" in command)
    return next(word for word in command.split() if word.startswith("-Xmx"))


def wait():
    """Wait for the test, which kills the driver."""
    time.sleep(600)


FAULTS = {
    "rank": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "executor": kill_executor,
    "wait": wait,
}


def estimator(run_dir, fault="", marker="", retries=2):
    """Return the training: 15 steps an epoch."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return TorchEstimator(
        model=model,
        loss=disturbed(torch.nn.functional.mse_loss, fault, marker, run_dir),
        optimizer=lambda weights: torch.optim.Adam(weights, lr=0.01),
        feature_cols=["x"],
        label_cols=["y"],
        epochs=EPOCHS,
        batch_size=8,
        ranks=2,
        seed=5,
        checkpoint_every=5,
        run_dir=run_dir,
        retries=retries,
        progress=False,
    )


def weights(model):
    """Return a hash of the weights."""
    parts = [tensor.numpy().tobytes() for _, tensor in sorted(model.module.state_dict().items())]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def without_flyte(run_dir):
    """Print the hash of a training that nothing disturbs and Flyte does not know of."""
    from pyspark.sql import SparkSession

    conf = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.driver.host": "127.0.0.1"}
    conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.sql.shuffle.partitions": "3"}
    spark = SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    print("WEIGHTS", weights(estimator(run_dir).fit(rows(spark)).model))
    spark.stop()


if __name__ == "__main__":
    without_flyte(sys.argv[1])
else:
    import flyte

    import tritium as tr
    from tritium.flyte import Gang, SavedModel, Spark, Table, run_dir, session

    CONF = {
        "spark.ui.enabled": False,
        "spark.ui.showConsoleProgress": False,
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": 3,
        "spark.executor.memory": "512m",
        "spark.executor.cores": 1,
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
    }
    env = flyte.TaskEnvironment("training", plugin_config=Spark(CONF))
    grows = Gang(ranks=2, spark=Spark(CONF), on_oom={"spark.executor.memory": 1.25}, progress=False)
    oom_env = flyte.TaskEnvironment("memory", plugin_config=grows)
    both_env = flyte.TaskEnvironment("both", depends_on=[env, oom_env])

    @env.task(retries=1)
    def fit(fault: str, marker: str, retries: int) -> dict[str, str]:
        """Return the hash of the weights of a training, and how many epochs its history has."""
        fitted = estimator(run_dir(), fault, marker, retries).fit(rows(session()))
        return {"weights": weights(fitted.model), "epochs": str(len(fitted.history))}

    @env.task
    def stored(marker: str) -> dict[str, str]:
        """Write rows, train on them as read back, with a rank killed and without; return places and both weights."""
        table = Table.written(rows(session()))
        hit = estimator(run_dir("hit"), "rank", marker).fit(table.read()).model
        other = estimator(run_dir("other")).fit(table.read()).model
        return {"uri": table.uri, "run_dir": run_dir("hit"), "hit": weights(hit), "undisturbed": weights(other)}

    @env.task(retries=1)
    def saved(fault: str, marker: str) -> SavedModel:
        """Return the model."""
        return SavedModel.of(estimator(run_dir(), fault, marker, 0).fit(rows(session())))

    @env.task
    def loaded(model: SavedModel) -> dict[str, str]:
        """Return the hash of a model's weights."""
        return {"weights": weights(model.load(trusted=True)), "hash": model.hash or ""}

    @both_env.task
    async def through_a_model(fault: str, marker: str) -> dict[str, str]:
        """Return the hash of the weights of a model that another task has saved."""
        return await loaded.aio(await saved.aio(fault, marker))

    @oom_env.task(retries=2)
    def wants_memory(marker: str) -> str:
        """Run out of memory in the first attempt; return the heap of rank 0's executor in the next."""
        if not Path(marker).exists():
            tr.world().barrier()
            Path(marker).touch()
            bytearray(1 << 62)
        return heap() if any("CoarseGrained" in command for _, command in _parents()) else "local"

    @oom_env.task
    def sums(rows: Table, factor: int) -> float:
        """Return a sum over the ranks' rows."""
        own = sum(float(batch["x"].sum()) for epoch in rows.epochs(1, batch_size=8) for batch in epoch)
        return factor * sum(tr.world().gather(own))

    @env.task
    def written() -> Table:
        """Return rows."""
        return Table.written(rows(session()))

    @both_env.task
    async def two_gangs() -> list[float]:
        """Return the results of two gangs that want all slots at once."""
        table = await written.aio()
        return list(await asyncio.gather(sums.aio(table, 1), sums.aio(table, 2)))
