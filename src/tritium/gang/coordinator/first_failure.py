"""Which failure is the first, where others may only follow from it (driver, or the first supervisor)."""

from __future__ import annotations

from tritium.gang.coordinator.members import Gang, Member
from tritium.gang.failure import Failure
from tritium.wire import Message

CAUSE_SECONDS = 0.7  # how long a failure that may be a consequence waits for the death that caused it
AWAY_SECONDS = 0.1  # how often it is looked whether a supervisor without a connection is lost, or back


class FirstFailure:
    """Holds back what a rank reports when it may be the consequence of another's death, such as a broken collective."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._doubtful: list[Failure] = []

    def on_failed(self, member: Member, message: Message) -> None:
        """A rank has failed."""
        failure = Failure.read({**message.fields, "rank": member.best_number}, message.blob)
        if not failure.doubt or self._gang.size == 1:
            self._gang.end(failure)
            return
        if not self._doubtful:
            self._gang.after(CAUSE_SECONDS, self._settle)
        self._doubtful.append(failure)

    def on_regroup(self, member: Member, message: Message) -> None:
        """The ranks agree to be started again, as a larger gang."""
        self._gang.end(Failure(how="regroup", rank=member.number, host=member.host, pid=member.pid))

    def _settle(self) -> None:
        """No death has explained what looked like its consequence: then that is the failure, the least doubtful first.

        A rank whose supervisor has no connection may have died with it: it comes back first, or is lost.
        """
        blamed = {failure.rank for failure in self._doubtful}
        others = [m for m in self._gang.members.values() if m.best_number not in blamed]
        if any(m.session.connection is None and m.session.over is None for m in others) and self._gang.failure is None:
            self._gang.after(AWAY_SECONDS, self._settle)
            return
        self._gang.end(min(self._doubtful, key=lambda failure: failure.doubt))
