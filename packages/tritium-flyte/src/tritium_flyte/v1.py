"""Tasks of flytekit, Flyte's first version: `Spark`, `Gang` and `MPIJob` (the driver of a task, a rank of mpirun).

Also called `tritium.flyte.v1`. For tasks of Flyte 2 there is `tritium.flyte`.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flytekitplugins.kfmpi
import flytekitplugins.spark
from flytekit import FlyteContextManager, current_context
from flytekit.core.base_task import IgnoreOutputs
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import TaskPlugins
from flytekitplugins.kfmpi.task import MPIFunctionTask
from flytekitplugins.spark.task import PysparkFunctionTask

from tritium.integration import join_mpirun
from tritium_flyte.driver.gangs import application_for, as_spark_writes, checked, on_ranks
from tritium_flyte.driver.retries import may_succeed_later
from tritium_flyte.driver.sessions import local

__all__ = ["Gang", "MPIJob", "Spark"]

_PATIENCE = 120
"""Seconds that a rank of mpirun which has failed waits for the others to leave, too."""


@dataclasses.dataclass
class Spark(flytekitplugins.spark.Spark):  # type: ignore[misc]
    """A task whose function runs on a Spark driver, as flytekit's own `Spark`, which it takes the place of.

    Estimators and `tr.launch` within it start gangs on the executors. An error is tried again by its class.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spark_conf: dict[str, str] = as_spark_writes(self.spark_conf)
        local.declare(self.local_conf, 1)

    @property
    def local_conf(self) -> dict[str, str]:
        """The settings of a local run."""
        return self.spark_conf | {f"spark.hadoop.{name}": value for name, value in self.hadoop_conf.items()}


class Gang(Spark):
    """A task whose function runs on every rank of a gang; its value is that of rank 0.

    For Flyte it is a Spark task. A parameter that gets a Spark DataFrame is on a rank the shard of that name; others
    arrive as they are.

    spark  : the Spark application around the gang, as of `tritium.flyte.Gang`.
    fields : those of `tr.Gang`. Without `run_dir`, a further attempt begins from the start.

    Raises BadSetting for fields or settings that are wrong, or contradict each other.
    """

    def __init__(self, *, spark: flytekitplugins.spark.Spark | None = None, **fields: Any) -> None:
        self.gang = checked(fields)
        super().__init__(**(vars(spark) if spark else {}))
        self.spark_conf |= application_for(self.gang, self.spark_conf)
        local.declare(self.local_conf, self.gang.most * (self.gang.cpus or 1))


class SparkTask(PysparkFunctionTask):  # type: ignore[misc]
    """flytekit's Spark task, with errors by class."""

    def pre_execute(self, user_params: Any) -> Any:
        """Return the parameters with the session. That of a local run has slots for every gang of the process."""
        state = FlyteContextManager.current_context().execution_state
        if state is not None and state.is_local_execution():
            with local.used(self.task_config.local_conf):
                return super().pre_execute(user_params)
        return super().pre_execute(user_params)

    def execute(self, **kwargs: Any) -> Any:
        """Run the function, and raise errors in flytekit's terms."""
        with errors_by_class():
            return self.run(kwargs)

    def run(self, arguments: dict[str, Any]) -> Any:
        """Run the function on the driver."""
        return super().execute(**arguments)


class GangTask(SparkTask):
    """A Spark task whose function runs on the ranks."""

    def run(self, arguments: dict[str, Any]) -> Any:
        """Run the function on every rank, and return the value of rank 0."""
        from pyspark.sql import DataFrame

        data = {name: value for name, value in arguments.items() if isinstance(value, DataFrame)}
        values = {name: value for name, value in arguments.items() if name not in data}
        return on_ranks(self.task_function, self.task_config.gang, values, data, current_context().spark_session)


@dataclasses.dataclass
class MPIJob(flytekitplugins.kfmpi.MPIJob):  # type: ignore[misc]
    """A task whose function mpirun calls on every rank, as flytekit's own `MPIJob`, which it takes the place of.

    `tr.world()` has rank, size and `peers`, `horovod.torch` of `tritium.compat` and torch's process group connect the
    ranks, and rank 0's value is the task's. Ranks need mpi4py. A local run calls the function once.
    """


class MPITask(MPIFunctionTask):  # type: ignore[misc]
    """flytekit's MPI task, with the ranks connected, one writer of results, and errors by class."""

    def execute(self, **kwargs: Any) -> Any:
        """Run the function on this rank. Raises IgnoreOutputs where another rank writes what the task returns."""
        world = join_mpirun()
        try:
            with errors_by_class():
                value = super().execute(**kwargs)
        except IgnoreOutputs:
            raise
        except Exception as error:
            if world.size > 1:
                _leave_in_time()
                if _has_failed():
                    raise IgnoreOutputs(
                        f"A rank has failed before rank {world.rank}, which failed by {error!r}."
                    ) from error
            raise
        if world.rank:
            raise IgnoreOutputs(f"Rank {world.rank} has no outputs: those of the task are rank 0's.")
        return value


def _leave_in_time() -> None:
    """Have this process killed where it can't leave MPI, as the others wait for it in a collective of MPI.

    mpirun then ends all. Otherwise its exit code is 0, and Flyte reads the error that the task has written: it takes
    another exit code for a failure of the system, and tries again whatever the error.
    """
    signal.alarm(_PATIENCE)


def _has_failed() -> bool:
    """Return whether a rank has written the task's error: the others fail because their peer is gone."""
    context = FlyteContextManager.current_context()
    prefix = current_context().output_metadata_prefix
    return prefix is not None and context.file_access.exists(f"{prefix}/error.pb")


@contextmanager
def errors_by_class() -> Iterator[None]:
    """Raise FlyteRecoverableException of an error that may not come again: flytekit tries no other one again."""
    try:
        yield
    except Exception as error:
        if not may_succeed_later(error):
            raise
        raise FlyteRecoverableException(f"{type(error).__name__}: {error}") from error


for _config, _task in ((Spark, SparkTask), (Gang, GangTask), (MPIJob, MPITask)):
    TaskPlugins.register_pythontask_plugin(_config, _task)
