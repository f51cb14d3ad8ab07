"""A workflow of flytekit's for tests: rows, a gang over them, ranks of mpirun, and what goes wrong in each."""

import os
import sys
from pathlib import Path

import pyspark.sql
from flytekit import current_context, task, workflow

import tritium as tr
import tritium.compat  # horovod, where it is not installed
from tritium.flyte.v1 import Gang, MPIJob, Spark

CONF = {
    "spark.ui.enabled": False,
    "spark.ui.showConsoleProgress": False,
    "spark.log.level": "ERROR",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": 3,
}
ON_SPARK = Spark(spark_conf=CONF)
ON_GANG = Gang(ranks=3, spark=ON_SPARK, retries=0, progress=False)
ON_MPI = MPIJob(num_workers=2, num_launcher_replicas=1, slots=1)


@task(task_config=ON_SPARK)
def rows(count: int) -> pyspark.sql.DataFrame:
    """Return the numbers below `count`, as x."""
    return current_context().spark_session.range(count).selectExpr("double(id) x")


@task(task_config=ON_GANG)
def total(rows: pyspark.sql.DataFrame, batch_size: int, factor: float) -> dict[str, float]:
    """Return the sum over all ranks, and how many there are."""
    assert "flytekit" not in sys.modules
    own = sum(float(b["x"].sum()) for epoch in rows.epochs(1, batch_size=batch_size) for b in epoch)
    return {"sum": factor * sum(tr.world().gather(own)), "ranks": float(tr.world().size)}


@workflow
def whole(count: int) -> dict[str, float]:
    """Return what two tasks make of it."""
    return total(rows=rows(count=count), batch_size=4, factor=2.0)


@task(task_config=ON_GANG)
def divides() -> float:
    """Raise the user's own exception, on rank 1."""
    return 1 / (1 - tr.world().rank)


@task(task_config=ON_GANG)
def loses_a_rank() -> int:
    """Lose rank 1."""
    if tr.world().rank == 1:
        os.kill(os.getpid(), 9)
    return tr.world().size


@task(task_config=ON_SPARK)
def is_cut_off() -> int:
    """Raise as a store does that does not answer."""
    if current_context().spark_session:
        raise ConnectionResetError("the store does not answer")
    return 0  # flytekit asks for one.


@task(task_config=ON_MPI)
def meets(folder: str) -> dict[str, list[int]]:
    """Return what ranks of mpirun know of each other, and what they sum by a process group and by Horovod."""
    import horovod.torch as hvd
    import torch
    import torch.distributed as dist

    world = tr.world()
    dist.init_process_group("gloo")
    number = torch.tensor([world.rank + 1])
    dist.all_reduce(number)
    hvd.init()
    summed = hvd.allreduce(torch.tensor([world.rank + 1]), op=hvd.Sum)
    Path(folder, f"{world.rank}").write_text(f"{world.rank} {world.size} {world.local_rank} {hvd.rank()} {hvd.size()}")
    facts = {"sums": [int(number), int(summed)], "pids": [peer.pid for peer in world.peers]}
    pids = world.gather(os.getpid())
    assert facts["pids"] == pids
    hvd.shutdown()
    dist.destroy_process_group()
    return facts | {"peers": [peer.rank for peer in world.peers]}


@task(task_config=ON_MPI)
def fails_alone(how: str) -> int:
    """Raise on rank 1, while rank 0 waits for it in a collective."""
    import torch
    import torch.distributed as dist

    world = tr.world()
    dist.init_process_group("gloo")
    if world.rank == 1:
        raise {"value": ValueError, "store": ConnectionResetError}[how]("rank 1 has its reasons")
    dist.all_reduce(torch.ones(1))
    return world.size
