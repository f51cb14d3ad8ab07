"""The Spark session of a local run, with the configuration of the task that uses it (the driver of a task)."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tritium.errors import TritiumWarning
from tritium_flyte.driver.memory import in_bytes

_STATIC = ("spark.sql.extensions", "spark.sql.catalog.", "spark.sql.warehouse.dir")
_MACHINES = (
    "spark.executor.",
    "spark.kubernetes.",
    "spark.dynamicAllocation.",
    "spark.task.",
    "spark.driver.memory",  # The largest of all environments is taken.
    "spark.driver.cores",
    "spark.master",
)
"""Settings of machines, of which a local run has none but this one."""


class LocalSession:
    """The one session of a local run, which all its tasks share.

    Spark SQL's settings are those of the task that runs. What is read when a context starts (extensions, jars) is that
    of all environments of this process. An environment that is made later has a new context start, where no other task
    runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots = os.cpu_count() or 1
        self._of_context: dict[str, str] = {}
        self._memory = 0
        self._applied: dict[str, str] = {}
        self._tasks = 0
        self._started = False

    def declare(self, conf: Mapping[str, str], slots: int) -> None:
        """Have the next context start with an environment's configuration, and with as many slots as it needs."""
        self._slots = max(self._slots, slots)
        self._of_context.update(_of_context(conf))
        self._memory = max(self._memory, in_bytes(conf.get("spark.driver.memory", "0")))

    @contextmanager
    def used(self, conf: Mapping[str, str]) -> Iterator[Any]:
        """Yield the session with this configuration."""
        with self._lock:
            session = self._session(conf)
            self._apply(session, {name: value for name, value in conf.items() if session.conf.isModifiable(name)})
            self._tasks += 1
        try:
            yield session
        finally:
            with self._lock:
                self._tasks -= 1

    def _session(self, conf: Mapping[str, str]) -> Any:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession

        try:
            session = SparkSession.active()
        except PySparkRuntimeError:
            session = None
        if session is not None and self._started and not self._tasks and _differing(session, self._of_context):
            session.stop()
            session = None
        if session is None:
            builder = SparkSession.builder.appName("flyte").master(f"local[{self._slots}]")
            if self._memory:  # It is that of the JVM, which starts once in a process.
                builder = builder.config("spark.driver.memory", f"{self._memory >> 20}m")
            session = builder.config(map=dict[str, Any](self._of_context)).getOrCreate()
            self._applied, self._started = {}, True
        if names := _differing(session, _of_context(conf)):
            warnings.warn(
                f"{', '.join(names)}: the tasks of a local run share one Spark context, which has other values. On a "
                "cluster each task has its own.",
                TritiumWarning,
                stacklevel=2,
            )
        return session

    def _apply(self, session: Any, conf: dict[str, str]) -> None:
        """Set a task's settings, and give back those of earlier tasks."""
        if not self._tasks:
            for name in self._applied.keys() - conf.keys():
                session.conf.unset(name)
        elif names := sorted({name for name, _ in conf.items() ^ self._applied.items()}):
            warnings.warn(
                f"{', '.join(names)}: another task with other values runs, and the tasks of a local run share one "
                "Spark session. On a cluster each task has its own.",
                TritiumWarning,
                stacklevel=2,
            )
        for name, value in conf.items():
            session.conf.set(name, value)
        self._applied = conf


local = LocalSession()


def _of_context(conf: Mapping[str, str]) -> dict[str, str]:
    """Return what is read when a context starts: not settings of machines, nor those of Spark SQL that can change."""
    return {
        name: value
        for name, value in conf.items()
        if not name.startswith(_MACHINES) and (name.startswith(_STATIC) or not name.startswith("spark.sql."))
    }


def _differing(session: Any, conf: Mapping[str, str]) -> list[str]:
    present = dict(session.sparkContext.getConf().getAll())
    return [name for name, value in conf.items() if present.get(name) != value]
