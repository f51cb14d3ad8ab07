"""Looks at the ranks from time to time, and puts together what is told of a stall (driver, or the first supervisor)."""

from __future__ import annotations

from collections.abc import Iterable

from tritium.gang.coordinator.rendezvous import Member
from tritium.gang.coordinator.stalls import (
    NO_ANSWER,
    Answer,
    Patience,
    Seat,
    Standing,
    Verdict,
    at_fault,
    judge,
    starved,
    starved_story,
    story,
)
from tritium.gang.failure import Failure
from tritium.gang.supervisor.process_stats import Lapse
from tritium.wire import Message


class StallWatch:
    """One gang's. `look`; when it answers yes `ask` for stacks, `take` them, and `conclude`."""

    def __init__(self, patience: Patience, size: int) -> None:
        self.patience = patience
        self.seconds = patience.look_seconds
        """From one look to the next."""
        self._size = size
        self._lapse: Lapse | None = None
        self._forgiven = 0.0
        self._told: set[tuple[str, int]] = set()
        self._dismissed: object = None
        self._number = 0
        self._open = False
        self._answers: dict[int, Answer] = {}
        self._texts: dict[int, str] = {}

    def look(self, members: Iterable[Member], now: float) -> bool:
        """Whether something stands still that has not been told yet."""
        lapse = (self._lapse or Lapse(now)).look(now)
        self._lapse = self._lapse or Lapse(now)
        if lapse:  # this process did not run: what was said meanwhile is still to be read
            self._forgiven = now
        seats = self._seats(members)
        verdict, hungry = judge(seats, self.patience, now), starved(seats, self.patience, now)
        found = _matters(verdict, hungry)
        if not found:
            self._told, self._dismissed = set(), None
        return bool(found - self._told) and not self._open and self._dismissed != _who(seats, verdict)

    def ask(self) -> int:
        """A new number, for the answers to come."""
        self._number += 1
        self._open = True
        self._answers, self._texts = {}, {}
        return self._number

    def take(self, number: int, rank: int, message: Message) -> bool:
        """A supervisor's answer. Whether it was the last."""
        if number == self._number and self._open:
            self._texts[rank] = message.blob.decode("utf-8", "replace")
            self._answers[rank] = Answer(
                self._texts[rank], str(message["where"]), str(message["collective"]), str(message["why"])
            )
        return self._open and len(self._answers) == self._size

    def conclude(self, number: int, members: Iterable[Member], now: float) -> tuple[Failure, bool] | None:
        """What is told of it, and whether it is beyond doubt; None when it has been told, or everything moves again."""
        if number != self._number or not self._open:
            return None
        self._open = False
        members = list(members)
        seats = self._seats(members)
        verdict, hungry = judge(seats, self.patience, now), starved(seats, self.patience, now)
        self._dismissed = _who(seats, verdict)
        stuck = self._at_fault(verdict.still, verdict)
        certain = bool(stuck or hungry)
        stuck = stuck if certain else self._at_fault(verdict.doubtful, verdict)
        if not stuck and hungry is None:
            return None
        self._told |= _matters(verdict, hungry)
        order = at_fault(seats, stuck, self._answers)
        ranks = {seat.rank for seat in order}
        others = [seat for seat in seats if seat.rank not in ranks]
        if stuck:
            first = order[0]
            seconds = first.standing.quiet + now - first.standing.heard
            text = story(first, order, others, self._answers, now)
        else:
            assert hungry is not None
            first = hungry
            seconds = first.standing.rows_quiet + now - first.standing.heard
            text = starved_story(hungry, [*order, *others], self._answers, now)
        stacks = {
            seat.rank: self._texts.get(seat.rank) or f"(no stack: {self._answers.get(seat.rank, NO_ANSWER).why})\n"
            for seat in seats
        }
        pid = next(member.pid for member in members if member.number == first.rank)
        at = {"step": first.standing.step, "phase": first.standing.phase, "seconds": round(seconds, 1)}
        failure = Failure(how="stalled", rank=first.rank, host=first.host, pid=pid, text=text, at=at, stacks=stacks)
        return failure, certain

    def _at_fault(self, seats: list[Seat], verdict: Verdict) -> list[Seat]:
        """Without those in an exchange, as long as a rank moves: they may wait for it, for its checkpoint, say."""
        if not verdict.moving:
            return seats
        return [seat for seat in seats if not self._answers.get(seat.rank, NO_ANSWER).collective]

    def _seats(self, members: Iterable[Member]) -> list[Seat]:
        seats = []
        for member in members:
            standing = member.standing or Standing(heard=member.joined)
            standing.heard = max(standing.heard, self._forgiven)
            seats.append(Seat(member.number, member.host, standing, member.finished))
        return sorted(seats, key=lambda seat: seat.rank)


def _matters(verdict: Verdict, hungry: Seat | None) -> set[tuple[str, int]]:
    """What is told once."""
    found = {("still", seat.rank) for seat in verdict.still} | {("doubtful", seat.rank) for seat in verdict.doubtful}
    return found if hungry is None else found | {("no rows", hungry.rank)}


def _who(seats: Iterable[Seat], verdict: Verdict) -> tuple[frozenset[int], ...]:
    """What must change before those that stand still are looked at again."""
    finished = [seat for seat in seats if seat.finished]
    groups = (verdict.still, verdict.doubtful, verdict.moving, finished)
    return tuple(frozenset(seat.rank for seat in group) for group in groups)
