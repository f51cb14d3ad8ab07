"""The Spark job of one attempt: submitted from a thread of its own, and cancelled by its tag (driver)."""

from __future__ import annotations

import contextlib
import pickle
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from tritium import ship
from tritium.errors import JobFailed, TritiumError, WrongVersion
from tritium.gang.control.address import unreachable_in
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.coordinator.on_executor import failure_in
from tritium.gang.driver.source_watch import SourceStall, SourceWatch
from tritium.gang.failure import signal_name
from tritium.gang.supervisor.results import SPARK_SCHEMA
from tritium.spark.cluster.base import Cluster
from tritium.spark.errors import OUT_OF_HEAP, more_memory, python_error, text_of, translate
from tritium.spark.inside import batch_bytes
from tritium.spark.python import drivers_python, on_this_machine, unchosen
from tritium.spark.session import is_connect

if TYPE_CHECKING:
    from tritium.gang.driver.attempt import Attempt

T = TypeVar("T")

ASK_SECONDS = 5.0  # the timeout of a cancellation over Spark Connect, whose client would retry for ten minutes
SETTLE_SECONDS = 0.5  # how long executors have to report to Spark that tasks have ended
_POLL_SECONDS = 0.02  # Spark has no notification of that
DYING_SECONDS = 0.5  # how long the JVM may take to exit after its connection broke
EXIT_SECONDS = 3.0  # and after its session was stopped, if it exits

_STARTING = "Spark starts the ranks' tasks (a session's first take seconds: Python starts), or all its slots are taken"
_SILENCE = f"no rank has reported yet: Spark still computes the source, {_STARTING.replace('Spark ', '')}"
_CONNECT_SILENCE = (
    "no rank has reported yet: Spark still computes the source, all its slots are taken, or executors can't reach this "
    "client (then output and progress come at the end)"
)

_TASKS = {False: "tritium.gang.supervisor.task:supervise", True: "tritium.gang.coordinator.on_executor:supervise"}


class SparkJob:
    """One attempt's job. Its thread sets `table` or `problem`, then `ended`, and notifies `coordinator.changed`.

    It does so whatever happens to the JVM. Methods that ask Spark raise nothing when it does not answer.
    """

    def __init__(
        self,
        spark: Any,
        cluster: Cluster,
        attempt: Attempt,
        coordinator: Coordinator,
        order: Any,
        frame: Any,
        row_bytes: int | None,
    ) -> None:
        from pyspark import InheritableThread

        self.tag = f"tritium-{attempt.name}"
        self.ended = False
        self.problem: BaseException | None = None
        self.table = pa.table({})
        self._spark = spark
        self._connect = cluster.is_connect
        self._row_bytes = row_bytes
        self.restarts = cluster.is_dynamic
        self._cluster, self._attempt = cluster, attempt
        self._coordinator = coordinator
        self._watch = SourceWatch(spark, self.tag, connect=self._connect)
        self._name = f"Tritium: {getattr(attempt.function, '__qualname__', 'a function')} on {order.size} ranks"
        code = (order.job, order.user_code)
        entry = ship.entry(_TASKS[self._connect], pickle.dumps(order), code=code)
        profile = cluster.profile(attempt.gang)
        with drivers_python(spark):
            self._frame = frame.mapInArrow(entry, SPARK_SCHEMA, barrier=not self.restarts, profile=profile)
        # Its threads inherit the user's job group and pool, so that "cancel" in a notebook reaches this job too.
        session = spark if self._connect else None
        self._thread = InheritableThread(self._collect, session=session, name=f"tritium-job-{attempt.name}")
        self._thread.daemon = True

    @property
    def silence(self) -> str:
        """The note that says why no rank has reported yet, with the progress of the sources."""
        if self._connect or not self._watch.tasks:
            return _CONNECT_SILENCE if self._connect else _SILENCE
        if not self._watch.busy:
            return f"no rank has reported yet: {self._watch.completed} tasks of the sources have ended, and {_STARTING}"
        quiet = time.monotonic() - self._watch.ended_since
        return (
            f"no rank has reported yet: Spark still computes the source ({self._watch.completed} of "
            f"{self._watch.tasks} tasks have ended, none in the last {quiet:.0f} s; see the Spark UI), or all its "
            "slots are taken"
        )

    def start(self) -> None:
        """Submit the job."""
        if self._connect:
            self._spark.registerProgressHandler(self._on_progress)
        self._thread.start()

    def _collect(self) -> None:
        try:
            try:
                if self._connect:
                    self._spark.addTag(self.tag)
                else:
                    self._describe(self._spark.sparkContext)
                self.table = self._frame.toArrow()
            finally:
                if self._connect:
                    self._spark.removeProgressHandler(self._on_progress)
        except BaseException as error:  # noqa: BLE001 - a thread has no one above it; the launching thread raises this
            self.problem = self._described(error)
        finally:
            with self._coordinator.changed:
                self.ended = True
                self._coordinator.changed.notify_all()

    def _describe(self, context: Any) -> None:
        """Set what Spark keeps for the jobs of this thread; it is gone with the thread."""
        from py4j.clientserver import ClientServer

        context.addJobTag(self.tag)
        context.setJobDescription(self._name)
        own = isinstance(context._gateway, ClientServer)  # else threads share the JVM's, and what is set for them
        if own and batch_bytes.out_of_reach(self._frame, self._row_bytes):  # a setting of the session's wins
            context.setLocalProperty(batch_bytes.SETTING, batch_bytes.UNCHECKED)

    def _described(self, error: BaseException) -> TritiumError:
        """Return the Tritium error for the job's exception, also when the JVM no longer answers."""
        try:
            text = text_of(error)
            try:
                failure = failure_in(text)
            except Exception as problem:  # noqa: BLE001 - Connect cuts long messages off, wherever that is
                return _cut_off(text, error, problem)
            if failure is None and (gone := jvm_gone(self._spark, error)) is not None:
                return gone
            if failure is not None:
                self._coordinator.fail(failure)
            stopped = self._is_stopped()
            if stopped and (gone := self._exited(error)) is not None:
                return gone
            told = translate(error, stopped=stopped, in_gang=self._in_gang, of_task=unreachable_in)
            return self._which_python(told) if isinstance(told, WrongVersion) else told
        except Exception as problem:  # noqa: BLE001 - the run must end, with what is known
            told = jvm_gone(self._spark, problem) or JobFailed(
                f"The Spark job of this run failed, and its error can't be read ({type(problem).__name__}: "
                f"{text_of(problem)[:300]}): {text_of(error)[:500]}",
                lost=False,
            )
            return _caused(told, error)

    def _which_python(self, problem: WrongVersion) -> WrongVersion:
        """Add which Python the session's UDFs run, where none was chosen with PYSPARK_PYTHON."""
        context = None if self._connect else self._spark.sparkContext
        if context is None or not unchosen(context.pythonExec) or not on_this_machine(context.master):
            return problem
        told = WrongVersion(
            f"{problem} The UDFs of this session run {shutil.which(context.pythonExec)}, the first "
            f"{context.pythonExec} of the PATH: os.environ['PYSPARK_PYTHON'] = sys.executable, before the session is "
            "made, has them run this one.",
            **problem.__dict__,
        )
        told.__cause__ = problem.__cause__
        return told

    def _is_stopped(self) -> bool:
        """Tell whether the session was stopped, from Python or in the JVM."""
        context = None if self._connect else self._spark.sparkContext._jsc
        return not self._connect and (context is None or bool(context.sc().isStopped()))

    def _exited(self, error: BaseException) -> JobFailed | None:
        """Return the error for a JVM that has stopped its session because it exits; None where it lives on.

        Python's own `stop` leaves the JVM alive, and is known by what it clears.
        """
        from pyspark import SparkContext

        process = getattr(SparkContext._gateway, "proc", None)
        if self._spark.sparkContext._jsc is None or process is None:
            return None
        try:
            process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return jvm_gone(self._spark, error)

    def _in_gang(self, stage: int, task: int) -> bool:
        """Tell whether a stage or a task is the gang's; without barrier stages, by the tasks that have reported."""
        if task in {member.attempt for member in list(self._coordinator.members.values())}:
            return True
        return not self._connect and self._watch.is_gang(stage)

    def computing(self, ranks: int) -> bool:
        """Tell whether Spark computes the sources: their tasks have ended since the last call, or run now.

        Connect does not report whose tasks run: there, as long as no rank has reported, any running task counts, also
        one of a gang that can't reach this client.
        """
        if self.ended or (self._connect and self._coordinator.members):
            return False
        return _safely(lambda: self._watch.look(ranks), False)

    def source_stall(self, limit: float) -> SourceStall | None:
        """Return the stall when the sources made no progress for `limit` seconds; None once a rank has reported."""
        if self._coordinator.members:
            return None
        return _safely(lambda: self._watch.stalled(limit), None)

    def _on_progress(self, *_: Any, inflight_tasks: int, stages: Any = (), **__: Any) -> None:
        if threading.current_thread() is self._thread:  # a handler is called for every operation of the session
            self._watch.heard(inflight_tasks, stages)

    def slots(self) -> int:
        """Count the ranks that the slots of this run and the free ones suffice for; 0 where that is not known."""
        return _safely(lambda: self._attempt.slots.room(lambda: self._cluster.slots(self._attempt.gang) or 0), 0)

    def cancel(self, reason: str) -> None:
        """Cancel this job alone. `reason` is shown in Spark's UI and log."""
        try:
            if not self._connect:
                self._wait_for_tasks()
        finally:
            cancel_tagged(self._spark, self.tag, reason)

    def _wait_for_tasks(self) -> None:
        """Wait until Spark knows that all tasks but one have ended: it logs a line for each that it cancels."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self.ended and time.monotonic() < deadline and _safely(self._watch.running, 0) > 1:
            time.sleep(_POLL_SECONDS)

    def join(self, seconds: float = 10.0) -> None:
        """Wait for the end of the job, up to `seconds`."""
        self._thread.join(seconds)


def cancel_tagged(spark: Any, tag: str, reason: str) -> None:
    """Cancel the jobs with this tag. Raises nothing when Spark does not answer. `reason` is shown in its UI and log."""
    if is_connect(spark):
        thread = threading.Thread(target=lambda: _safely(lambda: spark.interruptTag(tag), []), daemon=True)
        thread.start()
        thread.join(ASK_SECONDS)
    else:
        line = " ".join(reason.split())[:300]
        _safely(lambda: spark.sparkContext._jsc.sc().cancelJobsWithTag(tag, line), None)


def _safely(ask: Callable[[], T], unknown: T) -> T:
    """Return Spark's answer, or `unknown` without one; the job's own thread reports that Spark has ended."""
    try:
        return ask()
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if isinstance(error, (OSError, AttributeError)) or package in ("py4j", "pyspark", "grpc"):
            return unknown  # AttributeError: a session that was stopped has no context
        raise


def jvm_gone(spark: Any, error: BaseException) -> JobFailed | None:
    """Return the error to raise when `error` follows from the end of Spark's JVM or Connect server; else None."""
    if is_connect(spark):
        if not _is_unreachable(error):
            return None
        return _gone("The Spark Connect server can't be reached any more", "Connect again", error)
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None or _answers(gateway):
        return None
    process, code = getattr(gateway, "proc", None), None
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(DYING_SECONDS)
    who = "Spark's JVM, in which its driver runs" + (f" (pid {process.pid})" if process is not None else "")
    if code is None:
        how = "does not answer any more"
    else:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"has ended with exit code {code}"
    advice = "This Python process can't have another: restart it (or the notebook's kernel)"
    if code == OUT_OF_HEAP:
        how += ", as it does when it is out of memory (Java heap space)"
        advice = f"{more_memory('spark.driver.memory', '4g')}. {advice}"
    return _gone(f"{who}, {how}", advice, error)


def _is_unreachable(error: BaseException) -> bool:
    """Tell whether an error of the Connect client is its own; those of the server's jobs are of other classes."""
    if type(error).__name__ == "RetriesExceeded":
        return True
    of_client = type(error).__name__ == "SparkConnectGrpcException" or type(error).__module__.startswith("grpc")
    return of_client and re.search(r"StatusCode\.UNAVAILABLE|RETRIES_EXCEEDED", text_of(error)[:5000]) is not None


def _cut_off(text: str, error: BaseException, problem: BaseException) -> JobFailed:
    """Return an error for a failure that arrived truncated over Connect; its first line is still there."""
    told = JobFailed(
        f"A rank failed, and what it said came cut off over Spark ({type(problem).__name__}): {python_error(text)}",
        lost=False,
        reason=python_error(text),
    )
    return _caused(told, error)


def _gone(what: str, remedy: str, error: BaseException) -> JobFailed:
    told = JobFailed(
        f"{what}, and with it the Spark job of this run; all its ranks have been ended. {remedy}, and launch again.",
        lost=False,
        jvm_gone=True,
    )
    return _caused(told, error)


def _caused(problem: JobFailed, error: BaseException) -> JobFailed:
    """Return `problem` with Spark's own exception as its cause and its fact `spark_error`."""
    problem.__cause__ = error
    problem.__dict__["spark_error"] = error
    return problem


def _answers(gateway: Any) -> bool:
    try:
        gateway.jvm.java.lang.System.nanoTime()
    except Exception:  # noqa: BLE001 - whichever way Py4J or its socket says so
        return False
    return True
