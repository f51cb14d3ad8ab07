"""How a rank and its gang end, as the threads of its supervisor learn it (supervisor)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from tritium.errors import TritiumError
from tritium.gang.failure import Failure

STAY_SECONDS = 5.0  # how long a driver may take to cancel the Spark job
_REPORTED = ("exception", "error", "exit", "signal", "stalled")  # what Spark does not see by itself


class GangEnded(TritiumError):
    """The coordinator has ended this gang; the text says why."""


class Ending:
    """What has ended so far. Fields change under `changed`."""

    def __init__(self, daemon: int | None) -> None:
        self.changed = threading.Condition()
        self.reason: str | None = None
        """Why the gang has ended, if it has."""
        self.failure: Failure | None = None
        """The one that ended the gang, or this rank's own."""
        self.rank_finished = False
        """Whether this rank's function has returned,"""
        self.all_finished = False
        """and that of every rank."""
        self.exit_code: int | None = None
        """Of this rank's process."""
        self.outlasted = False
        """Whether the rank was killed because its exit handlers did not end."""
        self.stopped = threading.Event()
        """The supervisor lets go of everything."""
        self.may_leave = threading.Event()
        self.by_driver = False
        """Whether the coordinator that this supervisor reports to is the driver's."""
        self._daemon = daemon
        self._times = 0

    def on_end(self, reason: str, failure: Failure | None, refused: bool) -> None:
        """The coordinator has ended the gang. It says so again when the Spark job has ended, too."""
        if failure is not None:
            self.failure = failure
        self._times += 1
        if refused:  # a second copy of a task: Spark must not take it for the one that ended
            self.by_driver = False
        if self._times > 1:
            self.may_leave.set()

    def close(self, reason: str) -> None:
        """The gang has ended, unless all is well already."""
        with self.changed:
            if self.reason is None and not (self.all_finished and self.exit_code is not None):
                self.reason = reason
            self.changed.notify_all()

    def set_finished(self, *, everyone: bool) -> None:
        """This rank's function has returned, or that of every rank."""
        with self.changed:
            self.rank_finished = True
            self.all_finished = self.all_finished or everyone
            self.changed.notify_all()

    def set_exit(self, code: int) -> None:
        """The rank's process has ended."""
        with self.changed:
            self.exit_code = code
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Whether `until` came true, or the gang ended, within `seconds`."""
        with self.changed:
            return self.changed.wait_for(lambda: self.reason is not None or until(), seconds)

    def check(self) -> None:
        """Raise GangEnded if it has."""
        if self.reason is not None:
            raise GangEnded(self._story())

    def _story(self) -> str:
        if self.failure is None:
            return f"This gang was ended: {self.reason}"
        return "\n".join([self.failure.headline(), "", self.failure.traceback]).rstrip()

    @property
    def dismissed(self) -> bool:
        """Whether the driver has ended this gang, and lives on to say why; and Spark can use this worker again."""
        return self._times > 0 and self.by_driver and os.getppid() == self._daemon

    def stay(self, partition: int, rank: int) -> None:
        """The supervisor of the rank that failed, or of the first rank when none did, waits until the driver has
        cancelled the Spark job: Spark's UI shows it then as failed, with the reason, and Spark's log has one line.
        """
        if self.failure is None:
            stays = self.dismissed and partition == 0
        else:
            stays = self.dismissed and self.failure.rank == rank and self.failure.how in _REPORTED
        if stays:
            self.may_leave.wait(STAY_SECONDS)
