"""A SparkSession, classic or of Spark Connect: its settings, threads, tags, and whether it still answers (driver)."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from tritium.errors import BadSetting, JobFailed
from tritium.shown import signal_name
from tritium.spark import is_connect
from tritium.spark.errors import OUT_OF_HEAP, TOO_MANY_FAILURES, caused, more_memory, text_of

T = TypeVar("T")

_ENDED = "Spark or its cluster has ended {application}."
_AGAIN = "Make a new one, and launch with it."

ASK_SECONDS = 5.0  # The timeout of a cancellation over Spark Connect, whose client would retry for ten minutes.
DYING_SECONDS = 0.5  # How long the JVM may take to exit after its connection broke.
EXIT_SECONDS = 3.0  # And after its session was stopped, if it exits.


class Session:
    """A classic SparkSession, whose JVM this process talks to. Make it with `Session.of(spark)`."""

    connect: ClassVar[bool] = False

    def __init__(self, spark: Any) -> None:
        self.spark = spark

    @staticmethod
    def of(spark: Any) -> Session:
        """Return the session, classic or Connect. Asks Spark nothing."""
        return ConnectSession(spark) if is_connect(spark) else Session(spark)

    @staticmethod
    def usable(spark: Any) -> Session:
        """Do as `of`. Raises BadSetting for an object that is no session, or one that was stopped."""
        if not hasattr(spark, "range") or not hasattr(spark, "conf"):
            raise BadSetting(f"spark={spark!r} is no SparkSession.", setting="spark")
        session = Session.of(spark)
        session.refuse_stopped()
        return session

    @property
    def version(self) -> str:
        return str(self.spark.version)

    def setting(self, name: str, default: str = "") -> str:
        """Return a setting of the session, or of Spark's; `default` where it is not set."""
        value = self.spark.conf.get(name, default)
        return default if value is None else str(value)

    @property
    def id(self) -> str:
        """The id of the Spark application, which is that of what lives as long as it does."""
        return str(self.spark.sparkContext.applicationId)

    @property
    def context(self) -> Any:
        """The SparkContext of Scala."""
        return self.spark.sparkContext._jsc.sc()

    @property
    def is_stopped(self) -> bool:
        """Whether the session was stopped, from Python or in the JVM."""
        context = self.spark.sparkContext._jsc
        return context is None or bool(context.sc().isStopped())

    @property
    def stopped_itself(self) -> bool:
        """Whether the session was stopped in the JVM, which Python's own `stop` is known not to be."""
        return self.spark.sparkContext._jsc is not None and self.is_stopped

    def refuse_stopped(self, where_it_ended: str = "") -> None:
        """Raise BadSetting where the session was stopped, from Python or in the JVM, and JobFailed where that exits.

        where_it_ended : the sentence on where the cluster's manager says why it has ended {application}.
        """
        if safely(lambda: self.is_stopped, False):
            itself = safely(lambda: self.stopped_itself, False)
            where = safely(lambda: (where_it_ended or _ENDED).format(application=self.id), "") if itself else ""
            stopped = BadSetting(" ".join(filter(None, ["This SparkSession has been stopped.", where, _AGAIN])))
            if itself and (gone := self.exited(stopped)) is not None:
                raise gone from stopped
            raise stopped

    # ---- jobs

    def thread(self, work: Callable[[], object], name: str) -> threading.Thread:
        """Return a thread that inherits the user's job group and pool, so that "cancel" in a notebook reaches it."""
        from pyspark import InheritableThread

        thread = InheritableThread(work, session=self._inherited, name=name)
        thread.daemon = True
        return thread

    @property
    def _inherited(self) -> Any:
        return None

    def tag(self, tag: str, description: str) -> None:
        """Give the jobs of this thread a tag, and a description for Spark's UI."""
        self.spark.sparkContext.addJobTag(tag)
        self.spark.sparkContext.setJobDescription(description)

    def cancel(self, tag: str, reason: str) -> None:
        """Cancel the jobs with this tag. Raises nothing when Spark does not answer. `reason` is for its UI and log."""
        line = " ".join(reason.split())[:300]
        safely(lambda: self.context.cancelJobsWithTag(tag, line), None)

    def listen(self, handler: Callable[..., None]) -> None:
        """Have `handler` called with the progress of operations, where the server reports it."""

    def stop_listening(self, handler: Callable[..., None]) -> None:
        """Undo `listen`."""

    # ---- errors

    def gone(self, error: BaseException) -> JobFailed | None:
        """Return the error to raise when `error` follows from the end of Spark's JVM or Connect server; else None."""
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
        if code == TOO_MANY_FAILURES:
            how += ", as more executors failed or, on Kubernetes, were refused by a quota, than it allows"
            advice = f"Its log says why. Free the quota, or raise spark.executor.maxNumFailures. {advice}"
        return _gone(f"{who}, {how}", advice, error)

    def exited(self, error: BaseException) -> JobFailed | None:
        """Return the error for a JVM that has stopped its session because it exits; None where it lives on.

        Python's own `stop` leaves the JVM alive, and is known by what it clears.
        """
        from pyspark import SparkContext

        process = getattr(SparkContext._gateway, "proc", None)
        if self.spark.sparkContext._jsc is None or process is None:
            return None
        try:
            process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return self.gone(error)


class ConnectSession(Session):
    """A session of Spark Connect: a server has the JVM."""

    connect = True

    @property
    def id(self) -> str:
        """The id of the session, which is that of what lives as long as it does."""
        return str(self.spark.session_id)

    @property
    def is_stopped(self) -> bool:
        return False

    def refuse_stopped(self, where_it_ended: str = "") -> None:
        """Do nothing: a client that was stopped says so itself."""

    @property
    def _inherited(self) -> Any:
        return self.spark

    def tag(self, tag: str, description: str) -> None:
        self.spark.addTag(tag)

    def cancel(self, tag: str, reason: str) -> None:
        thread = threading.Thread(target=lambda: safely(lambda: self.spark.interruptTag(tag), []), daemon=True)
        thread.start()
        thread.join(ASK_SECONDS)

    def listen(self, handler: Callable[..., None]) -> None:
        self.spark.registerProgressHandler(handler)

    def stop_listening(self, handler: Callable[..., None]) -> None:
        self.spark.removeProgressHandler(handler)

    def gone(self, error: BaseException) -> JobFailed | None:
        if not _is_unreachable(error):
            return None
        return _gone("The Spark Connect server can't be reached any more", "Connect again", error)

    def exited(self, error: BaseException) -> JobFailed | None:
        return None


def active_session() -> Any:
    """Return the active SparkSession, or a new one. Raises ImportError without pyspark."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def safely(ask: Callable[[], T], unknown: T) -> T:
    """Return Spark's answer, or `unknown` without one; the job's own thread reports that Spark has ended."""
    try:
        return ask()
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if isinstance(error, (OSError, AttributeError)) or package in ("py4j", "pyspark", "grpc"):
            return unknown  # AttributeError: a session that was stopped has no context.
        raise


def _answers(gateway: Any) -> bool:
    try:
        gateway.jvm.java.lang.System.nanoTime()
    except Exception:  # noqa: BLE001 - whichever way Py4J or its socket says so
        return False
    return True


def _is_unreachable(error: BaseException) -> bool:
    """Tell whether an error of the Connect client is its own; those of the server's jobs are of other classes."""
    if type(error).__name__ == "RetriesExceeded":
        return True
    of_client = type(error).__name__ == "SparkConnectGrpcException" or type(error).__module__.startswith("grpc")
    return of_client and re.search(r"StatusCode\.UNAVAILABLE|RETRIES_EXCEEDED", text_of(error)[:5000]) is not None


def _gone(what: str, remedy: str, error: BaseException) -> JobFailed:
    return caused(
        JobFailed(
            f"{what}, and with it the Spark job of this run; all its ranks have been ended. {remedy}, and launch "
            "again.",
            lost=False,
            jvm_gone=True,
        ),
        error,
    )
