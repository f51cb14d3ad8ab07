"""Find stalls by the ranks' statuses, and build the failure with its report (driver, or the first supervisor)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tritium.gang.coordinator.collective_calls import CollectiveCalls
from tritium.gang.coordinator.members import Member
from tritium.gang.coordinator.stalls import (
    NO_ANSWER,
    Answer,
    RankStatus,
    Verdict,
    at_fault,
    describe_stall,
    describe_starved,
    judge,
    starved,
)
from tritium.gang.failure import Failure
from tritium.gang.stall_limit import StallLimit
from tritium.gang.supervisor.process_stats import Lapse
from tritium.wire import Message


class StallWatch:
    """The stalls of one gang. Call `look`; when it returns True, `ask` for stacks, `take` them, and `conclude`."""

    def __init__(self, limit: StallLimit, size: int) -> None:
        self.limit = limit
        self.seconds = limit.look_seconds
        """Seconds between two looks."""
        self._size = size
        self._lapse: Lapse | None = None
        self._forgiven = 0.0
        self._told: set[tuple[str, int]] = set()
        self._dismissed: object = None
        self._number = 0
        self.asking = False
        """Whether stacks are being collected."""
        self._answers: dict[int, Answer] = {}
        self._texts: dict[int, str] = {}

    def look(self, members: Iterable[Member], now: float) -> bool:
        """Tell whether there is a stall that has not been reported yet."""
        lapse = (self._lapse or Lapse(now)).look(now)
        self._lapse = self._lapse or Lapse(now)
        if lapse:  # This process was stopped, and heartbeats are still unread.
            self._forgiven = now
        statuses = self._statuses(members)
        verdict, starved_rank = judge(statuses, self.limit, now), starved(statuses, self.limit, now)
        stalls = _matters(verdict, starved_rank)
        if not stalls:
            self._told, self._dismissed = set(), None
        return bool(stalls - self._told) and not self.asking and self._dismissed != _who(statuses, verdict)

    def ask(self) -> int:
        """Begin to collect stacks, and return the number of this request."""
        self._number += 1
        self.asking = True
        self._answers, self._texts = {}, {}
        return self._number

    def take(self, number: int, rank: int, message: Message) -> bool:
        """Take a supervisor's answer, and tell whether it was the last."""
        if number == self._number and self.asking:
            self._texts[rank] = message.blob.decode("utf-8", "replace")
            counts = message.fields.get("calls")
            calls = None if counts is None else [CollectiveCalls(**fields) for fields in counts]
            # Who waits for a GPU is in no call of the framework's.
            waits = next((call.name for call in calls or () if call.waits is not None), "")
            self._answers[rank] = Answer(
                self._texts[rank],
                str(message["where"]),
                str(message["collective"]) or waits,
                str(message["why"]),
                calls,
            )
        return self.asking and len(self._answers) == self._size

    def conclude(self, number: int, members: Iterable[Member], now: float) -> Failure | None:
        """Return the failure to report; None when it was reported before, or every rank makes progress again."""
        if number != self._number or not self.asking:
            return None
        self.asking = False
        members = list(members)
        statuses = self._statuses(members)
        verdict, starved_rank = judge(statuses, self.limit, now), starved(statuses, self.limit, now)
        self._dismissed = _who(statuses, verdict)
        stuck = self._at_fault(verdict.still, verdict)
        if not stuck and starved_rank is None:
            return None
        self._told |= _matters(verdict, starved_rank)
        order = at_fault(statuses, stuck, self._answers)
        ranks = {status.rank for status in order}
        others = [status for status in statuses if status.rank not in ranks]
        if stuck:
            first = order[0]
            seconds = first.quiet + now - first.heard
            text = describe_stall(first, order, others, self._answers, now)
        else:
            assert starved_rank is not None
            first = starved_rank
            seconds = first.rows_quiet + now - first.heard
            text = describe_starved(starved_rank, [*order, *others], self._answers, now)
        stacks = {
            status.rank: self._texts.get(status.rank)
            or f"(no stack: {self._answers.get(status.rank, NO_ANSWER).why})\n"
            for status in statuses
        }
        pid = next(member.pid for member in members if member.number == first.rank)
        at = {"step": first.step, "phase": first.phase, "seconds": round(seconds, 1)}
        return Failure(how="stalled", rank=first.rank, host=first.host, pid=pid, text=text, at=at, stacks=stacks)

    def _at_fault(self, statuses: list[RankStatus], verdict: Verdict) -> list[RankStatus]:
        """Leave out ranks in a collective if another rank makes progress, as they may be waiting for that one."""
        if not verdict.moving:
            return statuses
        return [status for status in statuses if not self._answers.get(status.rank, NO_ANSWER).collective]

    def _statuses(self, members: Iterable[Member]) -> list[RankStatus]:
        statuses = []
        for member in members:
            status = member.status or RankStatus(heard=member.joined)
            statuses.append(
                replace(
                    status,
                    rank=member.number,
                    host=member.host,
                    finished=member.finished,
                    heard=max(status.heard, self._forgiven),
                )
            )
        return sorted(statuses, key=lambda status: status.rank)


def _matters(verdict: Verdict, starved_rank: RankStatus | None) -> set[tuple[str, int]]:
    """Return the keys of the stalls, each of which is reported once."""
    keys = {("still", status.rank) for status in verdict.still}
    return keys if starved_rank is None else keys | {("no rows", starved_rank.rank)}


def _who(statuses: Iterable[RankStatus], verdict: Verdict) -> tuple[frozenset[int], ...]:
    """Return a key that must change before the same stall is examined again."""
    finished = [status for status in statuses if status.finished]
    groups = (verdict.still, verdict.moving, finished)
    return tuple(frozenset(status.rank for status in group) for group in groups)
