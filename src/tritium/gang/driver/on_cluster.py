"""`on="cluster"`: the whole launch is one barrier stage, collected directly (driver)."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tritium.data.hangs import refuse_hanging
from tritium.errors import BadSetting, StartTimeout, TritiumError, WrongVersion
from tritium.gang.control.address import driver_place
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.coordinator.on_executor import newest_checkpoint, replay, result_limit
from tritium.gang.coordinator.stalls import Patience
from tritium.gang.driver.cluster import Cluster
from tritium.gang.driver.local_processes import order_of, ship_user_code
from tritium.gang.driver.outcome import LEAVE_SECONDS, GivenBack, await_end, await_formed
from tritium.gang.driver.spark_errors import text_of
from tritium.gang.driver.spark_job import SparkJob, jvm_gone
from tritium.gang.supervisor.results import results_of
from tritium.observe.stored import Piece

if TYPE_CHECKING:
    from tritium.gang.driver.launch import Launch

HOLD_SECONDS = 30.0  # how long slots are held while the rest of a gang does not come (dynamic allocation)


def run(launch: Launch) -> list[Any]:
    """Check the cluster, and start the gang; where its slots come one by one, as often as it takes."""
    spark = session_of(launch)
    try:
        return started(launch, spark)
    except TritiumError:
        raise
    except Exception as error:
        if (gone := jvm_gone(spark, error)) is not None:
            raise gone from error
        raise


def started(launch: Launch, spark: Any) -> list[Any]:
    """`run`, with a session whose JVM is there."""
    gang = launch.gang
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
    slots = cluster.wait_for_slots(gang, gang.start_timeout, launch.watch.note, launch.ranks)
    with read, slots, ExitStack() as open_now:
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
            prove=exchange.verify if exchange else None,
        ).start()
        open_now.callback(coordinator.close)
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
            if exchange and launch.watch.received and (problem := exchange.verify(launch.watch.received)):
                raise problem  # a far coordinator could not ask
            return results_of(batches, launch.ranks)
        finally:
            end_gang(coordinator, spark_job)
            open_now.close()  # the coordinator writes no more
            keep_spark_error(launch, spark_job.problem)
            if spark_job.problem is not None and cluster.is_connect and not coordinator.members:
                launch.watch.newest = newest_checkpoint(launch.watch.run_dir)


def end_gang(coordinator: Coordinator, spark_job: SparkJob) -> None:
    """End what is left of a gang: its ranks at once, its tasks by themselves, and the job, when it is not over yet.

    Of a gang that is ended from here, one supervisor waits until Spark has cancelled the job: the job is then seen to
    be cancelled in Spark's UI, and Spark's log has one line, not one for each rank.
    """
    coordinator.abort("the run is over")
    ended = spark_job.ended
    if not ended:
        coordinator.await_gone(LEAVE_SECONDS, but=1)
        spark_job.cancel("by Tritium: its launch has ended before it")
    coordinator.abort("its Spark job has ended")
    if not ended:
        spark_job.join(4.0)
    coordinator.await_gone(1.0)


def keep_spark_error(launch: Launch, problem: BaseException | None) -> None:
    """Java's stack is for who asks for it: in the run directory."""
    error = getattr(problem, "spark_error", None)
    if error is not None:
        try:
            launch.watch.store(Piece.whole("spark-error.txt", f"{text_of(error)}\n".encode("utf-8", "replace")))
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
