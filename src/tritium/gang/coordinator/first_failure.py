"""Find the first failure, where others may be its consequences (driver, or the first supervisor)."""

from __future__ import annotations

from tritium.gang.coordinator.members import GangState, Member
from tritium.gang.coordinator.returned import Returned
from tritium.gang.failure import Failure
from tritium.wire import Message

CAUSE_SECONDS = 0.7
"""So long a failure that may be a consequence waits for the death that caused it."""
AWAY_SECONDS = 0.1
"""The time between two checks whether a disconnected supervisor is lost or has reconnected."""


class FirstFailure:
    """Holds back failures that may be consequences of another rank's death, such as a broken collective."""

    def __init__(self, gang: GangState, returned: Returned) -> None:
        self._gang = gang
        self._returned = returned
        self._doubtful: list[Failure] = []
        self._regrouped: set[int] = set()

    def on_failed(self, member: Member, message: Message) -> None:
        """End the gang with a rank's failure, or hold it back for CAUSE_SECONDS."""
        failure = Failure.read({**message.fields, "rank": member.best_number}, message.blob)
        if not failure.doubt or self._gang.size == 1:
            self._gang.end(failure)
            return
        if not self._doubtful:
            self._gang.after(CAUSE_SECONDS, self._decide)
        self._doubtful.append(failure)

    def on_regroup(self, member: Member, message: Message) -> None:
        """End the gang, to be started again elsewhere or with more ranks, when every rank has asked for it.

        Rank 0 asks after it has told of the checkpoint, and must not be ended before.
        """
        self._regrouped.add(member.number)
        if len(self._regrouped) < self._gang.size:
            return
        text = self._gang.notice or "there are slots for more ranks"
        self._gang.end(Failure(how="regroup", rank=member.number, host=member.host, pid=member.pid, text=text))

    def _decide(self) -> None:
        """End the gang with the least doubtful failure that was held back, or its explanation, as no death came.

        Waits while another rank's supervisor is disconnected: it may turn out to be lost, which is the cause then.
        """
        blamed = {failure.rank for failure in self._doubtful}
        others = [m for m in self._gang.members.values() if m.best_number not in blamed]
        if (
            any(m.session.connection is None and m.session.closed is None for m in others)
            and self._gang.failure is None
        ):
            self._gang.after(AWAY_SECONDS, self._decide)
            return
        self._gang.end(self._returned.explain(self._doubtful))
