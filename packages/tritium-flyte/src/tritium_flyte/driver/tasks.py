"""`Spark` and `Gang`: a task on a Spark driver, and one on every rank of a gang (the driver of a task)."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import html
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import flyte
import flyte.report
import flyteplugins.spark
from flyte.extend import TaskPluginRegistry
from flyteplugins.spark.task import PysparkFunctionTask

import tritium as tr
from tritium.errors import TritiumError, TritiumWarning
from tritium.integration.page import RunsPage
from tritium_flyte import on_rank
from tritium_flyte.driver import memory
from tritium_flyte.driver.context import SESSION, run_dir, session
from tritium_flyte.driver.gangs import application_for, as_spark_writes, checked, on_ranks
from tritium_flyte.driver.models import SavedModel
from tritium_flyte.driver.outcomes import in_flytes_terms
from tritium_flyte.driver.sessions import local
from tritium_flyte.tables import Table

REPORT_SECONDS = 2.0
"""The time between two versions of the report."""
_TAB, _ERROR = "Tritium", "Error"

configurations: weakref.WeakKeyDictionary[Callable[..., Any], Spark] = weakref.WeakKeyDictionary()
"""Function of a task → the configuration of its environment. Flyte's cache policies know the function alone."""


class Spark(flyteplugins.spark.Spark):  # type: ignore[misc]
    """A task whose function runs on a Spark driver: `flyte.TaskEnvironment(…, plugin_config=Spark({…}))`.

    Estimators and `tr.launch` within it start gangs on the executors.

    conf : Spark's settings. A local run has them, too, but those of machines.
    hadoop_conf, executor_path, applications_path, driver_pod, executor_pod : as of `flyteplugins.spark.Spark`.
    """

    def __init__(
        self,
        conf: Mapping[str, Any] | None = None,
        *,
        hadoop_conf: Mapping[str, str] | None = None,
        executor_path: str | None = None,
        applications_path: str | None = None,
        driver_pod: flyte.PodTemplate | None = None,
        executor_pod: flyte.PodTemplate | None = None,
    ) -> None:
        self.conf = as_spark_writes(conf or {})
        super().__init__(
            spark_conf=dict(self.conf),
            hadoop_conf=dict(hadoop_conf or {}),
            executor_path=executor_path,
            applications_path=applications_path,
            driver_pod=driver_pod,
            executor_pod=executor_pod,
        )
        local.declare(self.local_conf, 1)

    @property
    def local_conf(self) -> dict[str, str]:
        """The settings of a local run."""
        return self.conf | {f"spark.hadoop.{name}": value for name, value in self.hadoop_conf.items()}


class Gang(Spark):
    """A task whose function runs on every rank of a gang; its value is that of rank 0.

    For Flyte it is a Spark task: a backend needs no plug-in of its own for it. A parameter annotated `Table` is on a
    rank the shard of that name, a `SavedModel` an object with `load(trusted)`; others arrive as they are. The function
    may be a coroutine function. Ranks need not have Flyte.

    spark  : the Spark application around the gang. Executors, their cores and GPUs, and no dynamic allocation, follow
             from the gang; where `spark` says otherwise, it is refused.
    on_oom : factors by which memory grows for the attempt after one that ran out of it:
             `{"spark.executor.memoryOverhead": 1.5}`. Without it, running out of memory is not tried again.
    fields : those of `tr.Gang`. `run_dir` is by default that of `run_dir()`, which all attempts share.

    Raises BadSetting for fields or settings that are wrong, or contradict each other.
    """

    def __init__(self, *, spark: Spark | None = None, on_oom: Mapping[str, float] | None = None, **fields: Any) -> None:
        application = spark or Spark()
        self.gang = checked(fields)
        self.on_oom = dict(on_oom or {})
        super().__init__(
            application.conf,
            hadoop_conf=application.hadoop_conf,
            executor_path=application.executor_path,
            applications_path=application.applications_path,
            driver_pod=application.driver_pod,
            executor_pod=application.executor_pod,
        )
        memory.check(self.on_oom, self.conf)
        self.spark_conf = self.conf | application_for(self.gang, self.conf)
        local.declare(self.local_conf, self.gang.most * (self.gang.cpus or 1))


@dataclasses.dataclass(kw_only=True)
class SparkTask(PysparkFunctionTask):  # type: ignore[misc]
    """Flyte's Spark task, with the configuration applied also locally, errors by class, and a report."""

    plugin_config: Spark

    def __post_init__(self) -> None:
        """Have a report: `TaskEnvironment.task` says False where the user says nothing."""
        super().__post_init__()
        self.report = True
        self._resources = ExitStack()
        configurations[self.func] = self.plugin_config

    async def pre(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the session, for `flyte.ctx().data`."""
        if not flyte.ctx().is_in_cluster():  # type: ignore[no-untyped-call]
            block = local.used(self.plugin_config.local_conf)
            return {SESSION: await asyncio.to_thread(self._resources.enter_context, block)}
        if settings := self._after_oom():
            await asyncio.to_thread(_session_with, settings)
        data: dict[str, Any] = await super().pre(*args, **kwargs)
        return data

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, with a report that is written again while it runs, and raise errors in Flyte's terms."""
        attempt, page = copy.copy(self), RunsPage()
        attempt._resources = ExitStack()
        if isinstance(self.plugin_config, Gang):
            attempt.func = functools.partial(_on_gang, self.func, self.plugin_config.gang)
        showing = asyncio.create_task(_keep_showing(page))
        try:
            with attempt._resources, tr.listen(page.add):
                return await PysparkFunctionTask.execute(attempt, *args, **kwargs)
        except Exception as error:
            on_oom = self.plugin_config.on_oom if isinstance(self.plugin_config, Gang) else {}
            if on_oom and isinstance(error, TritiumError) and error.out_of_memory:
                _oom_count().add()
            await _show(page, error)
            raise in_flytes_terms(error, raises_memory=bool(on_oom)) from error
        finally:
            showing.cancel()
            await _show(page)

    async def post(self, return_vals: Any) -> Any:
        """Leave the session: what follows writes results with it. It ends with the driver."""
        return return_vals

    def _after_oom(self) -> dict[str, str]:
        """Return the settings of this attempt that are not those of the application as it was submitted."""
        config = self.plugin_config
        if not isinstance(config, Gang) or not config.on_oom or not (times := _oom_count().read()):
            return {}
        return memory.raised(config.on_oom, config.conf, times)


def _session_with(settings: Mapping[str, str]) -> None:
    """Make the driver's session with more memory for executors, which have not been asked for yet."""
    from pyspark.sql import SparkSession

    SparkSession.builder.config(map=dict(settings)).getOrCreate()


def _on_gang(function: Callable[..., Any], gang: tr.Gang, *args: Any, **kwargs: Any) -> Any:
    """Run a task's function on every rank, and return the value of rank 0."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    spark = session()
    data = {name: value.read(spark) for name, value in bound.arguments.items() if isinstance(value, Table)}
    values = {name: _for_rank(value) for name, value in bound.arguments.items() if name not in data}
    if gang.run_dir is None:
        gang = dataclasses.replace(gang, run_dir=run_dir())
    return on_ranks(function, gang, values, data, spark)


def _for_rank(value: Any) -> Any:
    """Return what a rank gets, which may not have Flyte."""
    return on_rank.ModelPlace(value.path) if isinstance(value, SavedModel) else value


def _oom_count() -> memory.Count:
    return memory.Count(f"{run_dir()}.oom")


async def _keep_showing(page: RunsPage) -> None:
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        await _show(page)


async def _show(page: RunsPage, error: Exception | None = None) -> None:
    """Write the report, where there is something new. That it can't be written does not fail the task.

    error : what ends the task, which may have had no run; it has a tab of its own.
    """
    text = page.taken()
    if text is None and error is None:
        return
    if text is not None:
        flyte.report.get_tab(_TAB).replace(text)
    if error is not None:
        flyte.report.get_tab(_ERROR).replace(f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>")
    try:
        await flyte.report.flush.aio()
    except Exception as error:  # noqa: BLE001 - Of any store.
        warnings.warn(f"The report could not be written: {error!r:.300}", TritiumWarning, stacklevel=2)


for _config in (Spark, Gang):
    TaskPluginRegistry.register(_config, SparkTask)
