"""End a gang in which a rank is hung, or report it, with all ranks' stacks (driver, or the first supervisor)."""

from __future__ import annotations

import time
from dataclasses import replace

from tritium.events import GangStalled, Note
from tritium.gang.coordinator.members import GangState, Member
from tritium.gang.coordinator.reports import Reports
from tritium.gang.coordinator.stall_watch import StallWatch
from tritium.gang.coordinator.stalls import RankStatus
from tritium.gang.failure import Failure
from tritium.gang.stall_limit import StallLimit
from tritium.observe.stored import Piece
from tritium.wire import Message

STACKS_SECONDS = 3.0
"""The limit for supervisors to answer with stacks."""


class StallAlarm:
    """Checks the ranks periodically; when one seems hung, asks every supervisor for its rank's stacks."""

    def __init__(self, gang: GangState, limit: StallLimit, reports: Reports) -> None:
        self._gang = gang
        self._reports = reports
        self._watch = StallWatch(limit, gang.size)

    @property
    def asking(self) -> bool:
        """Whether supervisors are being asked for stacks."""
        return self._watch.asking

    def start(self) -> None:
        """Schedule the first check."""
        self._gang.after(self._watch.seconds, self._look)

    def _look(self) -> None:
        """Check, and schedule the next check. Ends with the last function: after it, supervisors limit their ranks."""
        gang = self._gang
        if gang.finished:
            return
        gang.after(self._watch.seconds, self._look)
        if gang.formed and gang.failure is None and self._watch.look(gang.members.values(), time.monotonic()):
            number = self._watch.ask()
            gang.broadcast("stacks", number=number)
            gang.after(STACKS_SECONDS, lambda: self._conclude(number))

    def on_stacks(self, member: Member, message: Message) -> None:
        """Take a supervisor's stacks; conclude when they were the last."""
        if self._watch.take(int(message["number"]), member.number, message):
            self._conclude(int(message["number"]))

    def _conclude(self, number: int) -> None:
        gang = self._gang
        if gang.failure is not None or gang.finished:
            return
        failure = self._watch.conclude(number, gang.members.values(), time.monotonic())
        if failure is None:  # It was reported before, or the ranks have made progress since.
            return
        if self._reports.non_fatal_errors:
            before = "\n".join(f"  {error.headline()}" for error in self._reports.non_fatal_errors)
            failure = replace(failure, text=f"{failure.text}\n\nBefore that:\n{before}")
        keep_stacks(gang, failure)
        if self._watch.limit.end:
            gang.end(failure)
            return
        gang.observer.event(
            GangStalled(text=failure.text, rank=failure.rank, host=failure.host, seconds=failure.at.get("seconds"))
        )
        gang.observer.event(Note(text=failure.text))


def keep_stacks(gang: GangState, failure: Failure) -> None:
    """Store the stacks of a failure, one file a rank; an error of that is only noted."""
    try:
        for rank, text in sorted(failure.stacks.items()):
            gang.observer.store(Piece.whole(f"stacks/rank-{rank}.txt", text.encode("utf-8", "replace")))
    except Exception as error:  # noqa: BLE001 - a full disk or a lost store must not hide the stall
        gang.observer.event(Note(text=f"the stacks can't be kept in the run directory: {error}"))


def on_status(member: Member, message: Message) -> None:
    """Keep the status from a rank's heartbeat."""
    member.status = RankStatus.read(message.fields, time.monotonic())
