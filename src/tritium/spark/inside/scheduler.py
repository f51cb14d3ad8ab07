"""Slots and executors, as Spark's scheduler counts them (driver; not with Connect)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tritium.spark.inside import Inside
from tritium.spark.session import Session


def probe(spark: Any) -> str | None:
    """Return why slots can't be counted in this session; None where they can."""
    session = Session.of(spark)
    draws_bar(session)
    return None if slots(session, None) >= 0 and executors(session) >= 0 else "this Spark counts no slots"


used = Inside("scheduler", probe)


def slots(session: Session, profile: Any) -> int:
    """Count the tasks of this ResourceProfile of pyspark, None: the session's, that all executors can run at once.

    Spark throws where an executor has fewer cores than such a task needs.
    """
    manager = session.context.resourceProfileManager()
    if profile is None:
        return int(session.context.maxNumConcurrentTasks(manager.defaultResourceProfile()))
    java = profile._java_resource_profile
    manager.addResourceProfile(java)  # Spark throws for an unregistered profile.
    return int(session.context.maxNumConcurrentTasks(java))


def executors(session: Session) -> int:
    """Count the executors that tasks can be given to, as `slots` does; their block managers register later."""
    return int(session.context.getExecutorIds().size())


def leaving(session: Session, executors: Iterable[str]) -> set[str]:
    """Return those of these executors that Spark is decommissioning."""
    backend = session.context.schedulerBackend()
    inactive = [executor for executor in executors if not backend.isExecutorActive(executor)]
    if not inactive:
        return set()
    known = set(str(backend.getExecutorIds().mkString(" ")).split())  # A lost one is not among them.
    return known.intersection(inactive)


def replace_executor(session: Session, executor: str) -> bool:
    """Have Spark give up an executor and ask for another, as it does itself with one without heartbeats.

    Returns False for one that it does not count any more.
    """
    counted = bool(session.context.schedulerBackend().isExecutorActive(executor))
    return counted and bool(session.context.killAndReplaceExecutor(executor))


def executor_hosts(session: Session) -> list[str]:
    """List the hosts of the registered executors."""
    names = str(session.context.getExecutorMemoryStatus().keys().mkString(" ")).split()
    hosts = dict.fromkeys(name.rpartition(":")[0] for name in names)
    hosts.pop(session.setting("spark.driver.host"), None)  # The driver is among them.
    return list(hosts)


def seconds(session: Session, name: str, default: str) -> float:
    """Return a setting of the application that is a time, in seconds."""
    return float(session.context.conf().getTimeAsSeconds(name, default))


def draws_bar(session: Session) -> bool:
    """Tell whether Spark draws a progress bar on this process's stderr."""
    return bool(session.context.progressBar().isDefined())
