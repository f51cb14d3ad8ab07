"""Who is told to reset which connections, and when a failure is explained by ranks that have returned."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from tritium.gang.coordinator.members import Member
from tritium.gang.coordinator.returned import IDLE_SECONDS, Returned
from tritium.gang.coordinator.stalls import RankStatus
from tritium.gang.failure import Failure
from tritium.wire import Message


class Session:
    """What a member was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send(self, kind: str, blob: bytes = b"") -> None:
        self.sent.append((kind, json.loads(blob or b"null")))


class Gang:
    """A formed gang of three ranks on two hosts, of which the last two have returned. Every process is idle."""

    formed, finished, failure, size = True, False, None, 3

    def __init__(self) -> None:
        self.members = {
            rank: Member(rank, 0, f"h{rank > 1:d}", f"10.0.0.{rank > 1:d}", 4000, 7, rank=rank, finished=rank > 0)
            for rank in range(3)
        }
        for member in self.members.values():
            member.session = Session()
            idle: Any = dict.fromkeys(("quiet", "idle"), 2 * IDLE_SECONDS)
            member.status = RankStatus(heard=time.monotonic(), state="S", **idle)

    def after(self, seconds: float, call: Any) -> None:
        """Call nothing: the test does."""

    def told(self) -> list[list[tuple[str, Any]]]:
        return [member.session.sent for member in self.members.values()]


def test_nobody_is_told_while_stacks_are_collected() -> None:
    gang: Any = Gang()
    asking = [True, False]
    returned = Returned(gang, lambda: asking.pop(0))
    returned._look()
    assert gang.told() == [[], [], []]
    returned._look()
    assert gang.told() == [[("returned", None)], [], []]


def look(gang: Any, times: int = 1) -> list[list[tuple[str, Any]]]:
    returned = Returned(gang)
    for _ in range(times):
        returned._look()
    return gang.told()


def test_who_may_wait_is_told_once() -> None:
    assert look(Gang(), times=3) == [[("returned", None)], [], []]


@pytest.mark.parametrize(
    ("rank", "change"),
    [
        (0, {"quiet": 1.0}),  # a batch, a line of output
        (0, {"idle": 1.0}),  # it computes
        (0, {"state": "T"}),  # Ctrl-Z
        (0, {"state": "D"}),  # a slow disk
        (0, {"state": "R"}),  # no processor for it
        (1, {"idle": 1.0}),  # its threads are at work
        (2, {"heard": 0.0}),  # of an hour ago: this process was suspended, perhaps with the others
    ],
)
def test_nothing_is_reset_while_a_rank_may_be_at_work(rank: int, change: dict[str, Any]) -> None:
    gang = Gang()
    member = gang.members[rank]
    assert member.status is not None
    member.status = replace(member.status, **change)
    assert look(gang) == [[], [], []]


def test_nothing_is_reset_where_no_rank_has_returned() -> None:
    gang = Gang()
    for member in gang.members.values():
        member.finished = False
    assert look(gang) == [[], [], []]


def test_each_is_sent_the_connections_to_its_address() -> None:
    gang = Gang()
    here, there, elsewhere = (["10.0.0.0 1", f"{address} 2"] for address in ("10.0.0.0", "10.0.0.1", "192.168.0.9"))
    message = Message("connections", {}, json.dumps([here, there, elsewhere]).encode())
    Returned(gang).on_connections(gang.members[0], message)  # type: ignore[arg-type]
    assert gang.told() == [[], [("reset", [here, elsewhere])], [("reset", [there, elsewhere])]]


def failure(rank: int, *, secondary: bool = True) -> Failure:
    return Failure(how="exception", rank=rank, type="RuntimeError", text="closed", secondary=secondary)


def test_a_returned_rank_that_its_library_ends_is_where_it_was() -> None:
    gang: Any = Gang()
    aborted = Failure(how="signal", rank=1, signal="SIGABRT")  # less doubtful than the error of the rank that waited
    report = Returned(gang).explain([failure(0), aborted])
    assert (report.how, report.rank, report.is_loss) == ("returned", 1, False)
    assert report.text.startswith("ranks 1, 2 on h0, h1 are not where the others wait: their functions have returned. ")
    assert "  rank 1 (host h0): its function has returned\n" in report.text


def test_other_failures_stay_what_they_are() -> None:
    gang: Any = Gang()
    own = failure(0, secondary=False)
    assert Returned(gang).explain([own]) is own
    gang.members[1].finished = gang.members[2].finished = False
    assert Returned(gang).explain([failure(0)]) == failure(0)
    gang.formed = False
    assert Returned(gang).explain([failure(0)]) == failure(0)
