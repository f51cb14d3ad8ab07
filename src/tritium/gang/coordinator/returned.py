"""Ranks that wait in a collective for one whose function has returned (driver, or the first supervisor).

Such a wait never ends, but from here it looks like any other, such as for a download. So once a rank has returned and
no process of the gang does anything, connections to it are reset. A rank that waits for it gets an error from its
framework, of which `explain` makes the report; any other goes on, as the returned rank sends nothing more.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tritium.gang.coordinator.members import GangState, Member, numbers
from tritium.gang.coordinator.stalls import RankStatus
from tritium.gang.failure import Failure
from tritium.gang.rank.connections import Ends
from tritium.gang.supervisor.stacks import Frame, in_collective, where
from tritium.wire import Message

IDLE_SECONDS = 3.0
"""Without progress and without CPU in every rank for so long, none can be at work for another."""
LOOK_SECONDS = 0.5

_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.M)


class Returned:
    """Watches for such waits. Call `start`, and `explain` for a failure that another rank's end may have caused.

    asking : tells whether stacks are being collected, which also shows such a wait.
    """

    def __init__(self, gang: GangState, asking: Callable[[], bool] = lambda: False) -> None:
        self._gang = gang
        self._asking = asking
        self._told = False  # The ranks are told once of each time in which they are idle.

    def start(self) -> None:
        """Schedule the first look."""
        self._gang.after(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        gang = self._gang
        if gang.finished or gang.failure is not None:
            return
        gang.after(LOOK_SECONDS, self._look)
        members = list(gang.members.values())
        idle = gang.formed and any(m.finished for m in members) and all(map(_is_idle, members))
        idle = idle and not self._asking()
        if idle and not self._told:
            for member in members:
                if not member.finished:
                    member.session.send("returned")
        self._told = idle

    def on_connections(self, member: Member, message: Message) -> None:
        """Have the ranks that have returned reset the connections of one that may wait for them.

        Each is sent only the connections to its own address, as a thousand ranks have a million, and those to addresses
        that are none of the gang's.
        """
        members = self._gang.members.values()
        addresses: dict[str, list[Ends]] = {target.address: [] for target in members}
        others: list[Ends] = []
        for ends in json.loads(message.blob):
            addresses.get(ends[1].rpartition(" ")[0], others).append(ends)
        for target in members:
            if target.finished and (theirs := addresses[target.address] + others):
                target.session.send("reset", json.dumps(theirs).encode())

    def explain(self, failures: Sequence[Failure]) -> Failure:
        """Return the least doubtful failure, or the report of ranks that wait for one that has returned."""
        first = min(failures, key=lambda failure: failure.doubt)
        if not self._gang.formed:
            return first
        members = sorted(self._gang.members.values(), key=lambda member: member.number)
        gone = [member for member in members if member.finished]
        # A returned rank may be ended by its library when the ranks that waited for it end.
        failed = {one.rank: one for one in failures if one.rank not in {member.number for member in gone}}
        if not gone or not failed or not all(one.secondary for one in failed.values()):
            return first
        failure = min(failed.values(), key=lambda one: one.rank)
        waiting = sorted(failed)
        several = len(gone) > 1
        hosts = ", ".join(dict.fromkeys(member.host for member in gone))
        is_ = "are" if several else "is"
        their = "their functions have" if several else "its function has"
        call = in_collective(_frames(failure)) or "call"
        wait = f"{numbers(waiting)} wait{'s' if len(waiting) == 1 else ''} ({_place(failure)})"
        text = (
            f"{numbers(member.number for member in gone)} on {hosts} {is_} not where the others wait: {their} returned."
            f" {'They' if several else 'It'} never reached the {call} in which {wait}."
        )
        order = sorted(members, key=lambda member: not member.finished)
        lines = [f"  {_line(member, failed.get(member.number))}" for member in order]
        noticed = f"How rank {failure.rank} noticed it:\n{failure.traceback}".rstrip()
        return replace(
            failure,
            how="returned",
            rank=gone[0].number,
            host=gone[0].host,
            pid=gone[0].pid,
            secondary=False,
            pickled=b"",
            text="\n".join([text, "", "Where the ranks are:", *lines, "", noticed]),
            at={},
            stacks={one.rank: one.traceback for one in failed.values()},
        )


def _is_idle(member: Member) -> bool:
    status: RankStatus | None = member.status
    if status is None:
        return False
    if time.monotonic() - status.heard > IDLE_SECONDS:  # Perhaps all was suspended since.
        return False
    quiet = status.idle if member.finished else min(status.quiet, status.idle)
    # A rank that waits for a message sleeps. A stopped, swapped or starved one may have messages that it has not read.
    return quiet > IDLE_SECONDS and status.state == "S"


def _line(member: Member, failure: Failure | None) -> str:
    """Describe where a rank is, or was when it failed."""
    place = "its function has returned" if member.finished else member.status.place() if member.status else ""
    if failure is not None:
        place = ", ".join(filter(None, [_place(failure), where(_frames(failure))]))
    return f"rank {member.number} (host {member.host}): {place}"


def _place(failure: Failure) -> str:
    return RankStatus(heard=0.0, step=failure.at.get("step"), phase=failure.at.get("phase", "")).place()


def _frames(failure: Failure) -> list[Frame]:
    """Return the frames of the last exception in a failure's traceback, innermost first."""
    last = failure.traceback.rpartition("Traceback (most recent call last):")[2]
    return [Frame(*parts) for parts in reversed(_FRAME.findall(last))]
