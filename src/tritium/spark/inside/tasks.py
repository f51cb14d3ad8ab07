"""The tasks of a run's Spark job, as Spark's own UI has them (driver; not with Connect)."""

from __future__ import annotations

from typing import Any

from tritium.observe.timeline import SparkTask
from tritium.spark.inside import Inside
from tritium.spark.session import Session

MOST = 500
"""The tasks of a stage that are read, as each takes a few milliseconds."""
_SETTLE_MILLISECONDS = 2000


def probe(spark: Any) -> str | None:
    """Return None where this Spark has a store of its jobs; else it raises."""
    Session.of(spark).context.statusStore().jobsList(None).size()
    return None


used = Inside("tasks", probe)


def tasks_of(session: Session, tag: str) -> list[SparkTask]:
    """Return the tasks of the jobs with this tag that have started, up to MOST of each stage."""
    if not used(session.spark):
        return []
    context = session.context
    context.listenerBus().waitUntilEmpty(_SETTLE_MILLISECONDS)  # The end of the last tasks may be on its way.
    store = context.statusStore()
    jobs = store.jobsList(None)
    stages: dict[int, None] = {}
    for number in range(jobs.size()):
        job = jobs.apply(number)
        if job.jobTags().contains(tag):
            ids = job.stageIds()
            stages.update((int(ids.apply(i)), None) for i in range(ids.size()))
    return [task for stage in stages for task in _of_stage(store, stage)]


def _of_stage(store: Any, stage: int) -> list[SparkTask]:
    from py4j.protocol import Py4JJavaError

    try:
        data = store.lastStageAttempt(stage)
    except Py4JJavaError:  # A stage that was skipped, as its shuffle was still there, has no attempt.
        return []
    name = str(data.name())
    attempts = store.taskList(stage, data.attemptId(), MOST)
    tasks = []
    for number in range(attempts.size()):
        task = attempts.apply(number)
        length = task.duration()
        tasks.append(
            SparkTask(
                stage=stage,
                stage_name=name,
                index=int(task.index()),
                executor=str(task.executorId()),
                host=str(task.host()),
                start=task.launchTime().getTime() / 1000,
                seconds=int(length.get()) / 1000 if length.isDefined() else 0.0,
                status=str(task.status()),
            )
        )
    return tasks
