"""Tell whether Spark computes the sources of a gang, and whether its counts of them move (driver)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from tritium.spark.inside import scheduler
from tritium.spark.session import Session

HEARTBEATS = 2.5  # A limit is at least so many intervals of the executors' heartbeats, which bring the counts.
# A calculation that shows no count (a large batch of a UDF) looks like a source that hangs: only after so many times
# the limit is it worse to wait on than to end a run whose source may yet compute.
END_TIMES = 10
_COUNTS = (
    "numCompleteTasks",
    "numFailedTasks",
    "inputBytes",
    "inputRecords",
    "outputBytes",
    "outputRecords",
    "shuffleReadBytes",
    "shuffleReadRecords",
    "shuffleWriteBytes",
    "shuffleWriteRecords",
    "memoryBytesSpilled",
    "diskBytesSpilled",
)
_ADVICE = (
    "See its tasks and their thread dumps in the Spark UI; with spark.python.worker.tracebackDumpIntervalSeconds=60 "
    "every Python worker writes its stack to its executor's stderr once a minute. If this is how long the work takes: "
    'raise stall_timeout, or say on_stall="report".'
)


@dataclass(frozen=True)
class SourceStall:
    """Sources without progress: the report, a stage, its running tasks, the seconds, and those that end the gang."""

    text: str
    stage: int
    tasks: int
    seconds: float
    limit: float


class SourceWatch:
    """Checks the stages of one job, found by its tag, that are not the gang's own."""

    tells_apart: ClassVar[bool] = True
    """Whether running tasks of the sources are told from those of the gang."""

    def __init__(self, session: Session, tag: str) -> None:
        now = time.monotonic()
        self.completed = self.tasks = 0
        self.ended_since = now
        self._session, self._tag = session, tag
        self._gang: dict[int, bool] = {}
        self._active: list[int] = []
        self._counts: object = None
        self._moved = now

    @staticmethod
    def of(session: Session, tag: str) -> SourceWatch:
        """Return the watch for the kind of session."""
        return ConnectSourceWatch(session, tag) if session.connect else SourceWatch(session, tag)

    @property
    def busy(self) -> bool:
        """Whether tasks of the sources ran at the last `look`."""
        return bool(self._active)

    def heard(self, in_flight: int, stages: Iterable[Any]) -> None:
        """Take the server's progress report: the number of running tasks, and the job's stages."""

    # ---- Whether Spark is busy with the sources

    def look(self, ranks: int) -> bool:
        """Tell whether source tasks have ended since the last call, or run now. `ranks` is the gang's size."""
        tracker = self._context().statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(self._tag)]
        ids = {stage for job in jobs if job.isDefined() for stage in job.get().stageIds()}
        stages = [info.get() for info in map(tracker.getStageInfo, ids) if info.isDefined()]
        # A skipped stage has no time of submission.
        sources = [s for s in stages if s.submissionTime() and not self.is_gang(s.stageId())]
        before, self.completed = self.completed, sum(stage.numCompletedTasks() for stage in sources)
        self.tasks = sum(stage.numTasks() for stage in sources)
        if self.completed != before:
            self.ended_since = time.monotonic()
        barriers = any(self.is_gang(stage.stageId()) for stage in stages)
        self._active = [
            stage.stageId()
            for stage in stages
            if stage.numActiveTasks()
            and not self.is_gang(stage.stageId())
            and (barriers or stage.numTasks() != ranks or not self._may_be_gang(stage.stageId()))
        ]
        return bool(self._active) or self.completed != before

    def running(self) -> int:
        """Count the running tasks of this launch's jobs, by Spark's scheduler.

        The status tracker lags behind: with two tasks that start within 0.1 s of each other, it keeps saying one.
        """
        context = self._context()
        tracker, scheduler = context.statusTracker(), context.taskScheduler()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(self._tag)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job.isDefined() for stage in job.get().stageIds()]
        told = [info.get() for info in stages if info.isDefined()]
        managers = [scheduler.taskSetManagerForAttempt(stage.stageId(), stage.currentAttemptId()) for stage in told]
        return sum(manager.get().runningTasks() for manager in managers if manager.isDefined())

    def is_gang(self, stage: int) -> bool:
        """Tell whether this stage is the gang's own: the one with a barrier."""
        if stage not in self._gang:
            try:
                graph = self._context().statusStore().operationGraphForStage(stage).rootCluster()
            except Exception:  # noqa: BLE001 - Spark has not written this stage down yet (NoSuchElementException)
                return False
            self._gang[stage] = graph.getBarrierClusters().size() > 0
        return self._gang[stage]

    def _may_be_gang(self, stage: int) -> bool:
        """Tell whether a stage may be the gang's under dynamic allocation, where it has no barrier."""
        if self._session.setting("spark.dynamicAllocation.enabled", "false").lower() != "true":
            return False
        cluster = self._context().statusStore().operationGraphForStage(stage).rootCluster().childClusters()
        return any(cluster.apply(i).name() == "MapInArrow" for i in range(cluster.size()))

    # ---- Whether it makes progress

    def stalled(self, limit: float) -> SourceStall | None:
        """Return a stall when no count of the sources has moved for `limit` seconds (at least HEARTBEATS intervals)."""
        now = time.monotonic()
        stages = self.counts()
        if not stages or stages != self._counts:
            self._counts, self._moved = stages, now
            return None
        limit = max(limit, self.least_limit())
        seconds = now - self._moved
        if seconds <= limit:
            return None
        stage, tasks, completed, running, *_ = stages[0]
        text = (
            f"the source makes no progress: in stage {stage} of Spark's, {completed} of {tasks} tasks have ended, and "
            f"for {seconds:.1f} s no task has ended, read or written a byte or a record, as far as Spark reports. No "
            f"rank has started.\n\n{_ADVICE}"
        )
        return SourceStall(text, stage, running, round(seconds, 1), END_TIMES * limit)

    def counts(self) -> list[tuple[int, ...]]:
        """Return, of each stage at work, its number, its tasks, how many have ended and run, and their counts."""
        return [self._counts_of(stage) for stage in self._active]

    def least_limit(self) -> float:
        """Return the seconds for which counts may stay the same, as they come with heartbeats."""
        return HEARTBEATS * scheduler.seconds(self._session, "spark.executor.heartbeatInterval", "10s")

    def _counts_of(self, stage: int) -> tuple[int, ...]:
        data: Any = self._context().statusStore().lastStageAttempt(stage)
        tasks = (data.numTasks(), data.numCompleteTasks(), data.numActiveTasks(), data.attemptId())
        return (stage, *map(int, tasks), *(int(getattr(data, name)()) for name in _COUNTS))

    def _context(self) -> Any:
        return self._session.context


class ConnectSourceWatch(SourceWatch):
    """Does the same by the progress that a Connect server reports, which does not tell whose tasks run."""

    tells_apart = False

    def __init__(self, session: Session, tag: str) -> None:
        super().__init__(session, tag)
        self._in_flight = 0
        self._stages: tuple[tuple[int, int, int, int], ...] = ()
        self._ranks = 0

    def heard(self, in_flight: int, stages: Iterable[Any]) -> None:
        self._in_flight = in_flight
        self._stages = tuple((s.stage_id, s.num_tasks, s.num_completed_tasks, s.num_bytes_read) for s in stages)

    def look(self, ranks: int) -> bool:
        self._ranks = ranks
        return self._in_flight > 0

    def running(self) -> int:
        return 0

    def is_gang(self, stage: int) -> bool:
        return False

    def counts(self) -> list[tuple[int, ...]]:
        """Do it for stages that can't be the gang's own, whose counts never change.

        The server lists a stage whose output was there already as one of which no task has ended. So none is at work
        while all tasks that run may be those of a gang that can't reach this client.
        """
        unfinished = [stage for stage in self._stages if stage[2] < stage[1]]
        sources = [stage for stage in unfinished if stage[1] != self._ranks]
        of_gang = self._ranks if len(sources) < len(unfinished) else 0
        if self._in_flight <= of_gang:
            return []
        return [(stage, tasks, ended, self._in_flight, read) for stage, tasks, ended, read in sources]

    def least_limit(self) -> float:
        return 0.0
