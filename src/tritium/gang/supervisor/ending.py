"""The state of a rank's and its gang's end, shared by the threads of a supervisor (supervisor)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from tritium.errors import TritiumError
from tritium.gang.failure import Failure

STAY_SECONDS = 5.0  # A driver needs less to cancel the Spark job.
# Failures that Spark does not notice by itself.
_REPORTED = ("exception", "error", "exit", "signal", "stalled", "returned")


class GangEnded(TritiumError):
    """The coordinator has ended this gang; the text says why."""


class Ending:
    """The parts of the gang that have ended so far. Fields change while `changed` is held."""

    def __init__(self, daemon: int | None) -> None:
        self.changed = threading.Condition()
        self.reason: str | None = None
        """Why the gang has ended; None before."""
        self.failure: Failure | None = None
        """The failure that ended the gang, or this rank's own."""
        self.rank_finished = False
        """Whether this rank's function has returned."""
        self.all_finished = False
        """Whether every rank's function has returned."""
        self.exit_code: int | None = None
        """The exit code of this rank's process; None while it runs."""
        self.outlasted = False
        """Whether the rank was killed because its exit handlers did not end."""
        self.stopped = threading.Event()
        """Set when the supervisor releases its resources."""
        self.may_leave = threading.Event()
        """Set when the Spark job has ended, or the coordinator is gone; see `stay`."""
        self.by_driver = False
        """Whether the coordinator that this supervisor reports to is the driver's."""
        self._daemon = daemon
        self._times = 0

    def on_end(self, failure: Failure | None, refused: bool) -> None:
        """Record that the coordinator has ended the gang, and at its second message that the Spark job has ended.

        refused : whether it has refused this supervisor.
        """
        if failure is not None:
            self.failure = failure
        self._times += 1
        if refused:  # A second copy of a task must fail, or Spark takes its result.
            self.by_driver = False
        if self._times > 1:
            self.may_leave.set()

    def close(self, reason: str) -> None:
        """Record why the gang has ended, unless every rank has succeeded and this one has exited."""
        with self.changed:
            if self.reason is None and not (self.all_finished and self.exit_code is not None):
                self.reason = reason
            self.changed.notify_all()

    def set_finished(self, *, everyone: bool) -> None:
        """Record that this rank's function has returned, or that of every rank."""
        with self.changed:
            self.rank_finished = True
            self.all_finished = self.all_finished or everyone
            self.changed.notify_all()

    def set_exit(self, code: int) -> None:
        """Record the exit code of the rank's process."""
        with self.changed:
            self.exit_code = code
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `until()` is true or the gang has ended; False after `seconds`."""
        with self.changed:
            return self.changed.wait_for(lambda: self.reason is not None or until(), seconds)

    def check(self) -> None:
        """Raise GangEnded if the gang has ended."""
        if self.reason is not None:
            raise GangEnded(self._reason())

    def _reason(self) -> str:
        if self.failure is None:
            return f"This gang was ended: {self.reason}"
        return "\n".join([self.failure.headline(), "", self.failure.traceback]).rstrip()

    @property
    def dismissed(self) -> bool:
        """Whether a coordinator on the driver has ended this gang, and this worker's daemon is alive.

        Then the task may return without an exception, as the driver raises the error.
        """
        return self._times > 0 and self.by_driver and os.getppid() == self._daemon

    def stay(self, partition: int, rank: int) -> None:
        """In the supervisor of the rank that failed (of the first, if none did), wait until the job is cancelled.

        Spark's UI then shows the job as failed, with the reason, and its log has one line. Waits STAY_SECONDS at most.
        """
        if self.failure is None:
            stays = self.dismissed and partition == 0
        else:
            stays = self.dismissed and self.failure.rank == rank and self.failure.how in _REPORTED
        if stays:
            self.may_leave.wait(STAY_SECONDS)
