"""The Spark job of one attempt: submitted from a thread of its own, and cancelled by its tag (driver)."""

from __future__ import annotations

import math
import pickle
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tritium import ship
from tritium.errors import JobFailed, TritiumError, WrongVersion
from tritium.gang.control.address import unreachable_in
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.coordinator.on_executor import failure_in
from tritium.gang.order import Order
from tritium.gang.supervisor.results import SPARK_SCHEMA
from tritium.spark.cluster.base import Cluster
from tritium.spark.cluster.leaving import leaving
from tritium.spark.errors import caused, python_error, text_of, translate
from tritium.spark.inside import scheduler
from tritium.spark.inside.batch_bytes import leave_out_check
from tritium.spark.job import TaggedJob
from tritium.spark.python import drivers_python, told_which
from tritium.spark.session import safely
from tritium.spark.sources import SourceStall, SourceWatch

if TYPE_CHECKING:
    from tritium.gang.driver.attempt import Attempt

SETTLE_SECONDS = 0.5  # How long executors have to report to Spark that tasks have ended.
_POLL_SECONDS = 0.02  # Spark has no notification of that.

_STARTING = "Spark starts the ranks' tasks (a session's first take seconds: Python starts), or all its slots are taken"
# Keyed by whether executors reach the driver.
_SILENCE = {
    True: f"no rank has reported yet: Spark still computes the source, {_STARTING.replace('Spark ', '')}",
    False: "no rank has reported yet: Spark still computes the source, all its slots are taken, or executors can't "
    "reach this client (then output and progress come at the end)",
}
_TASKS = {True: "tritium.gang.supervisor.task:supervise", False: "tritium.gang.coordinator.on_executor:supervise"}


class SparkJob(TaggedJob[pa.Table]):
    """One attempt's job. Its end notifies `coordinator.changed`.

    Methods that ask Spark raise nothing when it does not answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        attempt: Attempt,
        coordinator: Coordinator,
        order: Order,
        frame: Any,
        row_bytes: int | None,
    ) -> None:
        session, tag = cluster.session, f"tritium-{attempt.name}"
        name = f"Tritium: {getattr(attempt.function, '__qualname__', 'a function')} on {order.size} ranks"
        super().__init__(session, tag, name, self._collect, coordinator.changed)
        self._row_bytes = row_bytes
        self.restarts = cluster.starts_one_by_one
        self._cluster, self._attempt = cluster, attempt
        self._coordinator = coordinator
        self._watch = SourceWatch.of(session, tag)
        entry = ship.entry(_TASKS[cluster.executors_reach_driver], pickle.dumps(order))
        profile = cluster.profile(attempt.gang)
        with drivers_python(session.spark):
            self._frame = frame.mapInArrow(entry, SPARK_SCHEMA, barrier=not self.restarts, profile=profile)

    @property
    def silence(self) -> str:
        """The note that says why no rank has reported yet, with the progress of the sources."""
        if not self._watch.tasks:
            return _SILENCE[self._cluster.executors_reach_driver]
        if not self._watch.busy:
            return f"no rank has reported yet: {self._watch.completed} tasks of the sources have ended, and {_STARTING}"
        quiet = time.monotonic() - self._watch.ended_since
        return (
            f"no rank has reported yet: Spark still computes the source ({self._watch.completed} of "
            f"{self._watch.tasks} tasks have ended, none in the last {quiet:.0f} s; see the Spark UI), or all its "
            "slots are taken"
        )

    def _collect(self) -> pa.Table:
        """Return the results as Spark collects them."""
        self.session.listen(self._on_progress)
        try:
            leave_out_check(self._frame, self._row_bytes)
            return self._frame.toArrow()
        finally:
            self.session.stop_listening(self._on_progress)

    def translated(self, error: BaseException) -> TritiumError:
        """Return the Tritium error for the job's exception, also when the JVM no longer answers."""
        session = self.session
        try:
            text = text_of(error)
            try:
                failure = failure_in(text)
            except Exception as problem:  # noqa: BLE001 - Connect cuts long messages off anywhere
                return _cut_off(text, error, problem)
            if failure is None and (gone := session.gone(error)) is not None:
                return gone
            if failure is not None:
                self._coordinator.fail(failure)
            stopped = session.is_stopped
            if stopped and (gone := session.exited(error)) is not None:
                return gone
            told = translate(
                error,
                stopped=stopped,
                where_it_ended=self._where_it_ended() if stopped else "",
                in_gang=self._in_gang,
                of_task=unreachable_in,
                why_lost=self._cluster.why_lost,
            )
            return told_which(session.spark, told) if isinstance(told, WrongVersion) else told
        except Exception as problem:  # noqa: BLE001 - the run must end, with all that is known
            told = session.gone(problem) or JobFailed(
                f"The Spark job of this run failed, and its error can't be read ({type(problem).__name__}: "
                f"{text_of(problem)[:300]}): {text_of(error)[:500]}",
                lost=False,
            )
            return caused(told, error)

    def _where_it_ended(self) -> str:
        session = self.session
        return self._cluster.where_it_ended.format(application=session.id) if session.stopped_itself else ""

    def _in_gang(self, stage: int, task: int) -> bool:
        """Tell whether a stage or a task is the gang's; without barrier stages, by the tasks that have reported."""
        if task in {member.attempt for member in list(self._coordinator.members.values())}:
            return True
        return self._watch.is_gang(stage)

    def computing(self, ranks: int) -> bool:
        """Tell whether Spark computes the sources: their tasks have ended since the last call, or run now.

        Connect does not report whose tasks run: there, as long as no rank has reported, any running task counts, also
        one of a gang that can't reach this client.
        """
        if self.ended or (self._coordinator.members and not self._watch.tells_apart):
            return False
        return safely(lambda: self._watch.look(ranks), False)

    def source_stall(self, limit: float) -> SourceStall | None:
        """Return the stall when the sources made no progress for `limit` seconds; None once a rank has reported."""
        if self._coordinator.members:
            return None
        return safely(lambda: self._watch.stalled(limit), None)

    def _on_progress(self, *_: Any, inflight_tasks: int, stages: Any = (), **__: Any) -> None:
        if self.is_this_thread():  # A handler is called for every operation of the session.
            self._watch.heard(inflight_tasks, stages)

    def slots(self) -> int:
        """Count the ranks that the slots of this run and the free ones suffice for; 0 where that is not known."""
        return safely(lambda: self._attempt.slots.room(lambda: self._cluster.slots(self._attempt.gang) or 0), 0)

    def leaving(self, executors: set[str]) -> tuple[set[str], float]:
        """Return those of these executors that Spark is decommissioning, and the seconds that they have."""
        return safely(lambda: leaving(self._cluster, executors), (set[str](), math.inf))

    def give_up(self, executor: str) -> None:
        """Have Spark replace an executor that no longer answers, where it still counts it.

        A host that is cut off is silent. Spark waits 120 s for heartbeats of an executor (spark.network.timeout), the
        control connection 10 s: the next attempt would start there, and wait.
        """
        ask = scheduler.used(self.session.spark)
        if ask and safely(lambda: scheduler.replace_executor(self.session, executor), False):
            self._attempt.recorder.note(
                f"Spark still counted executor {executor}, which does not answer: it is asked for another one"
            )

    def cancel(self, reason: str) -> None:
        """Cancel this job alone. `reason` is shown in Spark's UI and log."""
        try:
            self._wait_for_tasks()
        finally:
            super().cancel(reason)

    def _wait_for_tasks(self) -> None:
        """Wait until Spark knows that all tasks but one have ended: it logs a line for each that it cancels."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self.ended and time.monotonic() < deadline and safely(self._watch.running, 0) > 1:
            time.sleep(_POLL_SECONDS)


def _cut_off(text: str, error: BaseException, problem: BaseException) -> JobFailed:
    """Return an error for a failure that arrived truncated over Connect; its first line is still there."""
    told = JobFailed(
        f"A rank failed, and what it said came cut off over Spark ({type(problem).__name__}): {python_error(text)}",
        lost=False,
        reason=python_error(text),
    )
    return caused(told, error)
