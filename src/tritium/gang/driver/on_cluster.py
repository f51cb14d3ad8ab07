"""`on="cluster"`: a gang is one Spark job with a barrier stage, and its results are collected directly (driver)."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tritium.errors import BadSetting, StartTimeout, TritiumError, WrongVersion
from tritium.events import GangStarted
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.coordinator.on_executor import newest_checkpoint, replay, result_limit
from tritium.gang.driver.address import driver_place
from tritium.gang.driver.attempt import Attempt, order_of, ship_user_code, signalled, start_coordinator
from tritium.gang.driver.certificate import certificate_of
from tritium.gang.driver.outcome import LEAVE_SECONDS, GivenBack, await_end, await_formed
from tritium.gang.driver.spark_job import SparkJob
from tritium.gang.supervisor.results import results_of
from tritium.observe.stored import Piece
from tritium.spark.cluster import cluster_of
from tritium.spark.errors import text_of
from tritium.spark.inside.hangs import refuse_hanging
from tritium.spark.inside.tasks import tasks_of
from tritium.spark.python import note_of_functions
from tritium.spark.session import Session, active_session, safely

PAGE = "spark.tritium.ui"
"""The setting of a session whose runs are shown by a page of the driver."""
HOLD_SECONDS = 30.0
"""So long slots are held while the rest of a gang does not come (dynamic allocation)."""


class OnCluster:
    """Runs the ranks as the tasks of one Spark job."""

    def __init__(self, attempt: Attempt) -> None:
        self._spark = session_of(attempt)
        self._open = ExitStack()
        self._job: SparkJob | None = None
        with jvm_errors(self._spark):
            self._cluster = cluster_of(self._spark)
            self._cluster.sleep = attempt.cancellation.pause
            leaves_it_to_spark = attempt.gang.ui is None and not attempt.number
            if leaves_it_to_spark and Session.of(self._spark).setting(PAGE).lower() == "true":
                attempt.recorder.serve_page(PAGE)
            for data in attempt.data.values():
                refuse_hanging(data.frame)
            if note := note_of_functions(self._spark, [data.frame for data in attempt.data.values()]):
                attempt.recorder.note(note)
            self._certificate = certificate_of(attempt.gang.tls, attempt.recorder.note, self._spark)
            ranks = self._cluster.ranks_for(attempt.gang, attempt.recorder.note, again=attempt.number > 0)
            ranks = attempt.slots.resize(attempt.gang.least, ranks, lambda: self._cluster.slots(attempt.gang) or 0)
        self._attempt = attempt.sized(ranks)
        self._deadline = time.monotonic() + attempt.gang.start_timeout

    def start(self) -> None:
        """Wait for slots, start the coordinator, and submit the job."""
        with jvm_errors(self._spark):
            self._submit()

    def wait(self) -> list[Any]:
        """Return the results, or raise the error that ended the gang.

        When only some slots come (dynamic allocation), give them back, and submit the job again after a pause.
        """
        while True:
            try:
                with jvm_errors(self._spark):
                    return self._results()
            except GivenBack as given:
                self.cancel()
                self._deadline = max(self._deadline, given.deadline)
                self._pause(given)
            self.start()

    def signal(self, number: int) -> bool:
        """Send every rank a signal. Ranks whose coordinator is on an executor can't be reached."""
        return self._job is not None and signalled(self._coordinator, number)

    def interrupt(self) -> None:
        """Wake the thread in `start` or `wait`."""
        self._attempt.slots.stop_waiting()
        if self._job is not None:
            self._coordinator.notify()

    def cancel(self) -> None:
        """End the ranks, then the job, then the coordinator. The run keeps its slots for another attempt."""
        job, self._job = self._job, None
        with self._open:
            if job is not None:
                with jvm_errors(self._spark):
                    self._end(job)

    def _submit(self) -> None:
        attempt, cluster = self._attempt, self._cluster
        gang, exchange = attempt.gang, attempt.dealt()
        frame = exchange.frame if exchange else self._spark.range(0, attempt.ranks, 1, attempt.ranks)
        job, files = attempt.job()
        user_code = ship_user_code(attempt, files)
        self._began = time.monotonic()
        place = driver_place(self._spark, cluster)
        if exchange:
            self._open.enter_context(exchange.read())
            if exchange.as_arrays and not attempt.number:
                attempt.recorder.note(f"arrays leave the JVM number by number, not as bytes: {exchange.as_arrays}")
        cluster.take_slots(attempt.slots, gang, attempt.ranks, gang.start_timeout, attempt.recorder.note)
        attempt.cancellation.check()
        attempt.recorder.open()
        plan = exchange.plan if exchange else {}
        self._coordinator = start_coordinator(
            attempt, plan, place, exchange.verify if exchange else None, self._certificate
        )
        self._open.callback(self._coordinator.close)
        in_order = exchange is None or exchange.sorted
        limit = 0 if cluster.executors_reach_driver else result_limit(self._spark)
        order = order_of(
            attempt, self._coordinator, plan, job, user_code, sorted=in_order, deals_few=bool(plan), result_limit=limit
        )
        row_bytes = exchange.row_bytes if exchange else None
        self._job = SparkJob(cluster, attempt, self._coordinator, order, frame, row_bytes)
        self._exchange = exchange
        self._job.start()
        slots, bar = cluster.slots(gang), cluster.draws_bar
        attempt.recorder.event(GangStarted(ranks=attempt.ranks, tag=self._job.tag, slots=slots, bar=bar))

    def _results(self) -> list[Any]:
        attempt, job = self._attempt, self._job
        assert job is not None
        hold = HOLD_SECONDS if self._cluster.starts_one_by_one else None
        await_formed(self._coordinator, attempt, job, time.monotonic() - self._began, hold=hold)
        await_end(self._coordinator, attempt, job)
        assert job.result is not None
        batches = job.result.to_batches()
        replay(batches, attempt.recorder)
        received = attempt.recorder.received
        if self._exchange and received and (problem := self._exchange.verify(received)):
            raise problem  # A coordinator on an executor has no access to the exchange, so it is verified here.
        return results_of(batches, attempt.ranks)

    def _pause(self, given: GivenBack) -> None:
        gang = self._attempt.gang
        pause = HOLD_SECONDS * random.uniform(0.2, 1.0)  # Two gangs must not retry in step.
        if time.monotonic() + pause > self._deadline:
            raise StartTimeout(
                f"{given}, again and again within start_timeout={gang.start_timeout:g} s. Other jobs or gangs hold "
                "the rest: wait for them, ask for fewer ranks, or let the application have more executors.",
                missing=[],
            ) from given
        self._attempt.recorder.note(f"{given}: they are given back, and tried for again in {pause:.0f} s")
        self._attempt.cancellation.pause(pause)

    def _end(self, job: SparkJob) -> None:
        recorder = self._attempt.recorder
        end_gang(self._coordinator, job)
        self._coordinator.close()  # It records nothing after this.
        keep_spark_error(self._attempt, job.problem)
        if self._attempt.gang.trace:
            recorder.spark_tasks += safely(lambda: tasks_of(self._cluster.session, job.tag), [])
        unseen = not self._cluster.executors_reach_driver and not self._coordinator.members
        if job.problem is not None and unseen:
            try:
                recorder.newest = newest_checkpoint(recorder.run_dir)
            except Exception as error:  # noqa: BLE001 - a silent store must not hide why the run ended
                recorder.note(f"the checkpoints in {recorder.run_dir} can't be read: {error!r:.200}")


@contextmanager
def jvm_errors(spark: Any) -> Iterator[None]:
    """Raise a Tritium error instead of any that follows from the end of the JVM, the Connect server or the session."""
    try:
        yield
    except (TritiumError, GivenBack):
        raise
    except Exception as error:
        session = Session.of(spark)
        if (gone := session.gone(error)) is not None:
            raise gone from error
        session.refuse_stopped()
        raise


def end_gang(coordinator: Coordinator, spark_job: SparkJob) -> None:
    """End the ranks and their tasks, and cancel the job if it has not ended.

    One supervisor of a gang that is ended from here waits until the job is cancelled, so that Spark's UI shows the job
    as cancelled, and Spark's log has one line instead of one for each rank (decision 013).
    """
    coordinator.abort("the run is over")
    ended = spark_job.ended
    if not ended:
        try:
            coordinator.await_gone(LEAVE_SECONDS, but=1)
        finally:  # A second Ctrl-C must not leave the job to itself.
            spark_job.cancel("by Tritium: its launch has ended before it")
    coordinator.abort("its Spark job has ended")
    if not ended:
        spark_job.join(4.0)
    coordinator.await_gone(1.0)


def keep_spark_error(attempt: Attempt, problem: BaseException | None) -> None:
    """Write Spark's own error with its Java stack, if there is one, to `spark-error.txt` in the run directory."""
    error = problem.spark_error if isinstance(problem, TritiumError) else None
    if error is not None:
        try:
            attempt.recorder.store(Piece.whole("spark-error.txt", f"{text_of(error)}\n".encode("utf-8", "replace")))
        except OSError as refused:
            attempt.recorder.note(f"spark-error.txt can't be kept in the run directory: {refused}")


def session_of(attempt: Attempt) -> Any:
    """Return the session given, or that of the DataFrames, or the active one.

    Raises BadSetting for data that is no Spark DataFrame, and WrongVersion without pyspark.
    """
    if attempt.spark is not None:
        return attempt.spark
    for data in attempt.data.values():
        session = getattr(data.frame, "sparkSession", None)
        if session is None:
            raise BadSetting(
                f"On a cluster, data must be Spark DataFrames, not {type(data.frame).__name__}. Use "
                'spark.createDataFrame(table), or on="driver" to train on this machine.'
            )
        return session
    try:
        return active_session()
    except ImportError as error:
        raise WrongVersion('on="cluster" needs pyspark: pip install "tritium[spark]".') from error
