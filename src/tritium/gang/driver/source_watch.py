"""Tell whether Spark computes the sources of a gang, and whether they make progress (driver).

Progress is: a task of the sources has ended, has read or written a byte or a record (executors report that every ten
seconds), or computes in its executor; or a Python worker of Spark's on this machine uses CPU, or wakes up repeatedly,
as one does that sends a request to a server for every row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium.gang.supervisor.process_stats import STATES, Busy, state

HEARTBEATS = 2.5  # a stall is at least so many intervals of the executors' heartbeats, which bring the counts
CONNECT_TIMES = 10  # the limit is multiplied over Connect, which reports a task's bytes only when it has ended
_SWITCHES = 0.5  # voluntary context switches a second; a worker with more makes progress
_LOOKS = 8  # checks of the tasks within the limit
_NUMBERS = (
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
# Innermost frames of a Java thread that waits for another process, a disk or a lock.
_WAITS = ("EPoll", "Net.poll", "Dispatcher", "socketRead", "readBytes", "pread", "park", "Object.wait", "Thread.sleep")
_TASK_THREAD = "Executor task launch worker for task "
_PROC = Path("/proc")


@dataclass(frozen=True)
class SourceStall:
    """A stall of the sources: the report, the stage, its running tasks, the seconds without progress."""

    text: str
    stage: int
    tasks: int
    seconds: float


class SourceWatch:
    """Checks the stages of one job, found by its tag, that are not the gang's own."""

    def __init__(self, spark: Any, tag: str, *, connect: bool) -> None:
        now = time.monotonic()
        self.completed = self.tasks = 0
        self.ended_since = now
        self._spark, self._tag, self._connect = spark, tag, connect
        self._gang: dict[int, bool] = {}
        self._active: list[int] = []
        self._seen: object = None
        self._moved = self._looked = now
        self._workers: dict[int, _Worker] = {}
        self._in_flight = 0
        self._stages: tuple[tuple[int, int, int, int], ...] = ()
        self._ranks = 0
        self._jvm: int | None = None

    @property
    def busy(self) -> bool:
        """Whether tasks of the sources ran at the last `look`."""
        return bool(self._active)

    # ---- progress reported by Connect

    def heard(self, in_flight: int, stages: Iterable[Any]) -> None:
        """Take the server's progress report: the number of running tasks, and the job's stages."""
        self._in_flight = in_flight
        self._stages = tuple((s.stage_id, s.num_tasks, s.num_completed_tasks, s.num_bytes_read) for s in stages)

    # ---- is Spark busy with the sources?

    def look(self, ranks: int) -> bool:
        """Tell whether source tasks have ended since the last call, or run now. `ranks` is the gang's size."""
        self._ranks = ranks
        if self._connect:
            return self._in_flight > 0
        tracker = self._context().statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(self._tag)]
        ids = {stage for job in jobs if job.isDefined() for stage in job.get().stageIds()}
        stages = [info.get() for info in map(tracker.getStageInfo, ids) if info.isDefined()]
        sources = [s for s in stages if s.submissionTime() and not self.is_gang(s.stageId())]  # without a time: skipped
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
        if str(self._context().conf().get("spark.dynamicAllocation.enabled", "false")).lower() != "true":
            return False
        cluster = self._context().statusStore().operationGraphForStage(stage).rootCluster().childClusters()
        return any(cluster.apply(i).name() == "MapInArrow" for i in range(cluster.size()))

    # ---- does it make progress?

    def stalled(self, limit: float) -> SourceStall | None:
        """Return a stall when no source task made progress for `limit` seconds (at least HEARTBEATS intervals)."""
        now = time.monotonic()
        if self._connect:
            return self._stalled_on_connect(limit * CONNECT_TIMES, now)
        if not self._active:
            self._moved = now
            return None
        if now - self._looked < min(1.0, limit / _LOOKS):
            return None
        self._looked = now
        heartbeat = float(self._context().conf().getTimeAsSeconds("spark.executor.heartbeatInterval", "10s"))
        limit = max(limit, HEARTBEATS * heartbeat)
        seen = tuple(self._numbers(stage) for stage in self._active)
        idle = self._idle_workers(now)
        if seen != self._seen or idle is None:
            self._seen, self._moved = seen, now
            return None
        if now - self._moved <= limit:
            return None
        threads = self._threads()
        if any(thread.computes for thread in threads):
            self._moved = now
            return None
        return self._describe(threads, now)

    def _numbers(self, stage: int) -> tuple[Any, ...]:
        data = self._context().statusStore().lastStageAttempt(stage)
        return stage, data.attemptId(), *(getattr(data, name)() for name in _NUMBERS)

    def _idle_workers(self, now: float) -> list[int] | None:
        """List Spark's Python workers on this machine; None when one made progress since the last call."""
        pids = list(self._python_workers())
        busy = False
        for pid in pids:
            worker = self._workers.get(pid)
            if worker is None:
                worker = self._workers[pid] = _Worker(pid, now)
            busy = worker.moves(now) or busy
        self._workers = {pid: self._workers[pid] for pid in pids}
        return None if busy else pids

    def _python_workers(self) -> Iterator[int]:
        """Yield the pids of the Python workers that daemons of this application have forked on this machine."""
        if self._jvm is None:  # a child of this process, or its parent with spark-submit
            self._jvm = int(self._spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
        roots = {os.getpid(), self._jvm}
        application = f"--app-id\0{self._spark.sparkContext.applicationId}\0"
        parents: dict[int, int] = {}
        words: dict[int, str] = {}
        for folder in _PROC.glob("[0-9]*"):
            try:
                stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                parents[int(folder.name)] = int(stat[1])
                words[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
            except (OSError, IndexError):  # it has ended meanwhile
                continue
        roots |= {pid for pid, line in words.items() if application in line}
        for pid, line in words.items():
            parent = parents.get(pid, 0)
            if (
                "\0pyspark.daemon\0" in line
                and "\0pyspark.daemon\0" in words.get(parent, "")
                and _below(pid, roots, parents)
            ):
                yield pid

    def _threads(self) -> list[_Thread]:
        """List the task threads of the active stages, from thread dumps of their executors."""
        context = self._context()
        store = context.statusStore()
        executors: dict[str, set[int]] = {}
        for stage in self._active:
            attempt = store.lastStageAttempt(stage).attemptId()
            tasks = store.taskList(stage, attempt, 1 << 16)
            for task in (tasks.apply(i) for i in range(tasks.size())):
                if task.status() == "RUNNING":
                    executors.setdefault(task.executorId(), set()).add(int(task.taskId()))
        found = []
        for executor, ids in sorted(executors.items()):
            dump = context.getExecutorThreadDump(executor)
            for thread in dump.get() if dump.isDefined() else ():
                name = thread.threadName()
                if name.startswith(_TASK_THREAD) and any(name.endswith(f"(TID {task})") for task in ids):
                    frames = thread.stackTrace().elems()
                    top = [frames.apply(i).strip() for i in range(min(frames.size(), 1))]
                    runs = thread.threadState().toString() == "RUNNABLE"
                    found.append(_Thread(executor, name.removeprefix(_TASK_THREAD), runs, top[0] if top else ""))
        return found

    def _describe(self, threads: list[_Thread], now: float) -> SourceStall:
        stage, seconds = self._active[0], now - self._moved
        data: Any = self._context().statusStore().lastStageAttempt(stage)
        running = int(data.numActiveTasks())
        lines = [
            f"the source makes no progress: in stage {stage} of Spark's, {running} of {data.numTasks()} tasks run "
            f"({data.numCompleteTasks()} have ended), and for {seconds:.1f} s none of them has ended, read or written "
            "a byte, or used CPU as far as can be seen from here. No rank has started.",
            "",
            "Where its tasks are:",
            *(f"  task {thread.name} on executor {thread.executor}: {thread.top}" for thread in threads[:8]),
        ]
        if workers := sorted(self._workers):
            lines += [
                "",
                "Where Spark's Python workers on this machine are:",
                *(f"  {where(pid)}" for pid in workers[:8]),
            ]
        lines += ["", advice(workers)]
        return SourceStall("\n".join(lines), stage, running, round(seconds, 1))

    def _stalled_on_connect(self, limit: float, now: float) -> SourceStall | None:
        """Do as `stalled` over Connect, only for stages that can't be the gang's own, whose counts never change."""
        open_ = [stage for stage in self._stages if stage[2] < stage[1] and stage[1] != self._ranks]
        seen = (self._in_flight, self._stages)
        if seen != self._seen or not open_ or not self._in_flight:
            self._seen, self._moved = seen, now
            return None
        if now - self._moved <= limit:
            return None
        stage, tasks, completed, _ = open_[0]
        seconds = now - self._moved
        text = (
            f"the source makes no progress: in stage {stage} of Spark's, {completed} of {tasks} tasks have ended, and "
            f"none in the last {seconds:.1f} s, as far as Spark Connect tells. No rank has started.\n\n{advice([])}"
        )
        return SourceStall(text, int(stage), self._in_flight, round(seconds, 1))

    def _context(self) -> Any:
        return self._spark.sparkContext._jsc.sc()


@dataclass(frozen=True)
class _Thread:
    """A task's thread in an executor: whether it is RUNNABLE (`runs`), and its innermost frame (`top`)."""

    executor: str
    name: str
    runs: bool
    top: str

    @property
    def computes(self) -> bool:
        return self.runs and bool(self.top) and not any(word in self.top for word in _WAITS)


class _Worker:
    """Checks whether a Python worker of Spark's uses CPU or wakes up repeatedly."""

    def __init__(self, pid: int, now: float) -> None:
        self._pid, self._busy, self._then, self._woke = pid, Busy(pid, now), now, -1

    def moves(self, now: float) -> bool:
        """Tell whether it made progress since the last call; True at the first one."""
        before, self._woke = self._woke, switches(self._pid)
        seconds, self._then = now - self._then, now
        return self._busy.look(now) == 0.0 or before < 0 or self._woke - before > max(1.0, _SWITCHES * seconds)


def switches(pid: int) -> int:
    """Count the voluntary context switches of all threads of a process."""
    found = 0
    for file in (_PROC / str(pid) / "task").glob("*/status"):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:  # the thread has ended meanwhile
            continue
        found += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


def _below(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid in roots:
            return True
        pid = parents.get(pid, 0)
    return False


def where(pid: int) -> str:
    """Describe the state of a process: `pid 4711: sleeps in futex_wait_queue`."""
    letter = state(pid)
    doing = STATES.get(letter, {"S": "sleeps", "R": "runs", "I": "idle"}.get(letter, "unknown"))
    try:
        place = (_PROC / str(pid) / "wchan").read_text().strip()
    except OSError:
        place = ""
    return f"pid {pid}: {doing}" + (f" in {place}" if place not in ("", "0") else "")


def advice(workers: list[int]) -> str:
    """Return the advice at the end of the report: how to see stacks, and how to raise the limit."""
    look = "look at the tasks in the Spark UI"
    if workers:
        look = f"py-spy dump --pid {workers[0]} shows where a worker is"
    return (
        f"To see where Python stands: {look}; or start Spark with spark.python.worker.tracebackDumpIntervalSeconds=60, "
        "and every worker writes its stack to its executor's stderr once a minute. If this is how long the work takes: "
        'raise stall_timeout, or say on_stall="report".'
    )
