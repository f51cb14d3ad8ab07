"""`on="cluster"`: the whole launch is one barrier stage, collected directly (driver)."""

from __future__ import annotations

import pickle
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tritium import ship
from tritium.data.hangs import refuse_hanging
from tritium.errors import BadSetting, IncompleteShard, JobFailed, ResultError, StartTimeout, TritiumError, WrongVersion
from tritium.gang.address import driver_place, unreachable_in
from tritium.gang.cluster import Cluster
from tritium.gang.coordinator import Coordinator
from tritium.gang.driver_run import order_of, ship_user_code
from tritium.gang.far import failure_in, newest_checkpoint, replay, result_limit
from tritium.gang.finish import GivenBack, await_end, await_formed
from tritium.gang.results import SPARK_SCHEMA, results_of
from tritium.gang.stall import Patience
from tritium.gang.worker_python import drivers_python
from tritium.observe.stored import Piece

if TYPE_CHECKING:
    from tritium.gang.launch import Launch

_SILENCE = "no rank has reported yet: Spark still computes the source, or all its slots are taken"
_FAR_SILENCE = (
    "no rank has reported yet: Spark still computes the source, all its slots are taken, or executors can't reach this "
    "client (then output and progress come at the end)"
)


HOLD_SECONDS = 30.0  # how long slots are held while the rest of a gang does not come (dynamic allocation)


def run(launch: Launch) -> list[Any]:
    """Check the cluster, and start the gang; where its slots come one by one, as often as it takes."""
    gang = launch.gang
    spark = session_of(launch)
    cluster = Cluster.of(spark)
    for data in launch.data.values():
        refuse_hanging(data.frame, cluster.version)
    launch = launch.sized(cluster.ranks_for(gang, launch.watch.note, again=launch.attempt > 0))
    deadline = time.monotonic() + gang.start_timeout
    while True:
        try:
            return started_once(launch, spark, cluster)
        except GivenBack as given:
            pause = HOLD_SECONDS * random.uniform(0.2, 1.0)  # two gangs must not move in step
            if time.monotonic() + pause > deadline:
                raise StartTimeout(
                    f"{given}, again and again within start_timeout={gang.start_timeout:g} s. Other jobs or gangs hold "
                    "the rest: wait for them, ask for fewer ranks, or let the application have more executors.",
                    missing=[],
                ) from given
            launch.watch.note(f"{given}: they are given back, and tried for again in {pause:.0f} s")
            threading.Event().wait(pause)


def started_once(launch: Launch, spark: Any, cluster: Cluster) -> list[Any]:
    """Submit the job, wait, return the results of the ranks."""
    gang, exchange = launch.gang, launch.dealt()
    frame = exchange.frame if exchange else spark.range(0, launch.ranks, 1, launch.ranks)
    job = launch.job()
    user_code = ship_user_code(launch)
    began = time.monotonic()
    place = driver_place(spark, cluster)
    read = exchange.read() if exchange else nullcontext()
    with read, cluster.wait_for_slots(gang, gang.start_timeout, launch.watch.note, launch.ranks):
        launch.watch.open()
        coordinator = Coordinator(
            launch.ranks,
            launch=launch.name,
            run_id=launch.run_id,
            observer=launch.watch,
            listener=place.listen(),
            advertised=place.advertised,
            names=list(exchange.plan) if exchange else [],
            stream=launch.streams,
            patience=Patience.of(gang),
            prove=exchange.prove if exchange else None,
        ).start()
        plan = exchange.plan if exchange else {}
        in_order = exchange is None or exchange.sorted
        far_limit = result_limit(spark) if cluster.is_connect else None
        order = order_of(launch, coordinator, plan, job, user_code, sorted=in_order, far_limit=far_limit)
        spark_job = SparkJob(spark, cluster, launch, coordinator, order, frame)
        try:
            with own_interrupts():
                spark_job.start()
                launch.watch.event("started", ranks=launch.ranks, slots=cluster.slots(gang), tag=spark_job.tag)
                hold = HOLD_SECONDS if cluster.is_dynamic else None
                await_formed(coordinator, launch, spark_job, time.monotonic() - began, hold=hold)
                await_end(coordinator, launch, spark_job)
            batches = spark_job.table.to_batches()
            replay(batches, launch.watch)
            if exchange and launch.watch.received and (problem := exchange.prove(launch.watch.received)):
                raise problem  # a far coordinator could not ask
            return results_of(batches, launch.ranks)
        finally:
            coordinator.abort("the run is over")
            if not spark_job.ended:
                spark_job.cancel()
                spark_job.join(4.0)
            coordinator.await_gone(1.0)
            coordinator.close()
            keep_spark_error(launch, spark_job.problem)
            if spark_job.problem is not None and cluster.is_connect and not coordinator.members:
                launch.watch.newest = newest_checkpoint(launch.watch.run_dir)


def keep_spark_error(launch: Launch, problem: BaseException | None) -> None:
    """Java's stack is for who asks for it: in the run directory."""
    error = getattr(problem, "spark_error", None)
    if error is not None:
        try:
            launch.watch.store(Piece.whole("spark-error.txt", f"{error}\n".encode("utf-8", "replace")))
        except OSError as refused:
            launch.watch.note(f"spark-error.txt can't be kept in the run directory: {refused}")


def session_of(launch: Launch) -> Any:
    """The session given, or that of the DataFrames, or the active one."""
    if launch.spark is not None:
        return launch.spark
    for data in launch.data.values():
        session = getattr(data.frame, "sparkSession", None)
        if session is None:
            raise BadSetting(
                f"On a cluster, data must be Spark DataFrames, not {type(data.frame).__name__}. Use "
                'spark.createDataFrame(table), or on="driver" to train on this machine.'
            )
        return session
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise WrongVersion('on="cluster" needs pyspark: pip install "tritium[spark]".') from error
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


@contextmanager
def own_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here and ends this run; pyspark's handler would cancel every job of the session.

    (And would fail to, while this thread waits: see docs/how-it-works.md.)
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class SparkJob:
    """The barrier job in a thread of its own, so that waiting can be interrupted and the job cancelled by its tag."""

    def __init__(
        self, spark: Any, cluster: Cluster, launch: Launch, coordinator: Coordinator, order: Any, frame: Any
    ) -> None:
        from pyspark import InheritableThread

        self.tag = f"tritium-{launch.name}"
        self.ended = False
        self.problem: BaseException | None = None
        self.table = pa.table({})
        self._spark = spark
        self._connect = cluster.is_connect
        self.restarts = cluster.is_dynamic
        self._cluster, self._gang = cluster, launch.gang
        self._completed = self._tasks = 0
        self._moved = time.monotonic()
        self._in_flight = 0
        self._coordinator = coordinator
        self._name = f"Tritium: {getattr(launch.function, '__qualname__', 'a function')} on {order.size} ranks"
        entry = ship.entry("tritium.gang.supervisor:supervise", pickle.dumps(order))
        profile = cluster.profile(launch.gang)
        with drivers_python(spark):
            self._frame = frame.mapInArrow(entry, SPARK_SCHEMA, barrier=not self.restarts, profile=profile)
        # Its threads inherit the user's job group and pool, so that "cancel" in a notebook reaches this job too.
        session = spark if self._connect else None
        self._thread = InheritableThread(self._collect, session=session, name=f"tritium-job-{launch.name}")
        self._thread.daemon = True

    @property
    def silence(self) -> str:
        """Why no rank has reported yet, and how far Spark has come with the sources."""
        if self._connect or not self._tasks:
            return _FAR_SILENCE if self._connect else _SILENCE
        quiet = time.monotonic() - self._moved
        return (
            f"no rank has reported yet: Spark still computes the source ({self._completed} of {self._tasks} tasks have "
            f"ended, none in the last {quiet:.0f} s; see the Spark UI), or all its slots are taken"
        )

    def start(self) -> None:
        """Submit."""
        if self._connect:
            self._spark.registerProgressHandler(self._on_progress)
        self._thread.start()

    def _collect(self) -> None:
        try:
            if self._connect:
                self._spark.addTag(self.tag)
            else:
                self._spark.sparkContext.addJobTag(self.tag)
                self._spark.sparkContext.setJobDescription(self._name)
            self.table = self._frame.toArrow()
        except BaseException as error:  # noqa: BLE001 - a thread has no one above it; the launching thread raises this
            self.problem = translate(error, stopped=self._is_stopped())
            failure = failure_in(str(error))
            if failure is not None:
                self._coordinator.fail(failure)
        if self._connect:
            self._spark.removeProgressHandler(self._on_progress)
        with self._coordinator.changed:
            self.ended = True
            self._coordinator.changed.notify_all()

    def _is_stopped(self) -> bool:
        """Whether someone has stopped the session meanwhile, be it on its JVM's side."""
        context = None if self._connect else self._spark.sparkContext._jsc
        return not self._connect and (context is None or bool(context.sc().isStopped()))

    def computing(self, ranks: int) -> bool:
        """Whether Spark is busy with the sources: tasks have ended since the last look, or run in a stage that is not
        the gang's (which has as many tasks as ranks). Connect does not tell whose tasks run; there they may be those
        of a gang that can't reach this client, as long as nobody has reported.
        """
        if self._connect:
            return self._in_flight > 0 and not self._coordinator.members
        tracker = self._spark.sparkContext._jsc.sc().statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForTag(self.tag)]
        ids = {stage for job in jobs if job.isDefined() for stage in job.get().stageIds()}
        stages = [info.get() for info in map(tracker.getStageInfo, ids) if info.isDefined()]
        before, self._completed = self._completed, sum(stage.numCompletedTasks() for stage in stages)
        self._tasks = sum(stage.numTasks() for stage in stages)
        if self._completed != before:
            self._moved = time.monotonic()
        others = any(stage.numActiveTasks() and stage.numTasks() != ranks for stage in stages)
        return others or self._completed != before

    def _on_progress(self, *_: Any, inflight_tasks: int, **__: Any) -> None:
        if threading.current_thread() is self._thread:  # a session's handlers hear of all its operations
            self._in_flight = inflight_tasks

    def slots(self) -> int:
        """How many ranks the cluster has slots for, those of this gang among them; 0 where it does not tell."""
        return self._cluster.slots(self._gang) or 0

    def cancel(self) -> None:
        """Cancel this job alone."""
        if self._connect:
            self._spark.interruptTag(self.tag)
        else:
            self._spark.sparkContext.cancelJobsWithTag(self.tag)

    def join(self, seconds: float = 10.0) -> None:
        """Wait for the end of the job."""
        self._thread.join(seconds)


_WORKER_LACKS = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")

_TAKEN_AWAY = re.compile(r"ExecutorLostFailure|exited unexpectedly|Executor heartbeat timed out")


_CANCELLED = re.compile(r"Job \d+ cancelled.*?(?=\.?( SQLSTATE|$))", re.MULTILINE)


def translate(error: BaseException, *, stopped: bool = False) -> TritiumError:
    """Spark's exception as one of ours. Its own, whose text is mostly Java's stack, is the fact `spark_error`."""
    text = str(error)
    problem: TritiumError
    if stopped or "SparkContext was shut down" in text:
        problem = JobFailed(
            "The Spark job of this run was cancelled, because its SparkSession was stopped; all its ranks have been "
            "ended. Make a new session, and launch with it."
        )
    elif (unreached := unreachable_in(text)) is not None:
        problem = unreached
    elif "PYTHON_VERSION_MISMATCH" in text:
        problem = WrongVersion(
            "Driver and executors run different Python versions: "
            + _line_with(text, "PYTHON_VERSION_MISMATCH")
            + " Point spark.pyspark.python (or PYSPARK_PYTHON) to the same minor version."
        )
    elif "maxResultSize" in text:
        problem = ResultError(
            "The results of all ranks together are over spark.driver.maxResultSize: "
            + _line_with(text, "maxResultSize")
            + " Return less, raise that setting, or store large things with world.store()."
        )
    elif (lacking := _WORKER_LACKS.search(text)) is not None:
        problem = WrongVersion(
            f"The executors' Python lacks {lacking[1]!r}. They need pyarrow and numpy: install them where "
            "spark.pyspark.python points.",
            module=lacking[1],
        )
    elif "FetchFailed" in text:
        problem = IncompleteShard(
            "Spark lost map output of the exchange, with its executor or its disk, before the ranks had read it: "
            + _line_with(text, "FetchFailed")
            + " No rank took its shard for complete. Launch again, and Spark computes the source anew."
        )
    elif "No space left on device" in text:
        problem = JobFailed(
            f"A disk of Spark's is full: {_line_with(text, 'No space left on device').lstrip(': ')}. The exchange "
            "needs room for all rows in spark.local.dir, and every rank for its own once more: point it at a larger "
            "disk, or use more hosts."
        )
    elif "cancelled" in text.lower() or "OPERATION_CANCELED" in text:
        why = _CANCELLED.search(text)
        says = f" Spark says: {why[0].strip()}." if why else ""
        problem = JobFailed(f"The Spark job of this run was cancelled; all its ranks have been ended.{says}")
    else:
        reason, lost = _reason(text), bool(_TAKEN_AWAY.search(text))
        problem = JobFailed(f"The Spark job of this run failed: {reason}", lost=lost, reason=reason)
    problem.__dict__["spark_error"] = error
    return problem


def _line_with(text: str, word: str) -> str:
    return next((line.strip() for line in text.splitlines() if word in line), word)[:500]


def _reason(text: str) -> str:
    """The line that says why: an executor lost, why Spark gave the job up, the innermost cause, or the first line."""
    if "exited unexpectedly" in text and "ExecutorLostFailure" not in text:
        return (
            "its supervisor, a Python worker of Spark's, was killed or crashed: probably out of memory, unless someone "
            "killed it"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    given_up = [line for word in ("ExecutorLostFailure", "Job aborted") for line in lines if word in line]
    causes = [line for line in lines if line.startswith("Caused by:")][-1:]
    own = [line for line in lines if not line.startswith("An error occurred while calling")]
    return (given_up or causes or own or [text])[0].removeprefix("Caused by:").lstrip(": ")[:800]
