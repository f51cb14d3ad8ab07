"""Pass messages between the coordinator and a rank (supervisor)."""

from __future__ import annotations

import json
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from tritium.errors import TooLarge, TritiumError, WireError
from tritium.gang.control.address import unreachable, unreachable_executor
from tritium.gang.control.client import Client, Refused
from tritium.gang.failure import Failure
from tritium.gang.order import Order
from tritium.gang.supervisor.ending import Ending
from tritium.gang.supervisor.gpus import Listing
from tritium.gang.supervisor.host_clock import HostClock
from tritium.gang.supervisor.pmi import BARRIER_TAG, INIT_TAG, Pmi
from tritium.gang.supervisor.spooler import Spooler
from tritium.wire import CHUNK, Channel, Message

SMALL = 1 << 14
"""The bytes that a socket with room accepts without blocking."""
CONNECT_SECONDS = 10.0
_LOOK_SECONDS = 0.05
"""The time between two looks whether all messages of an ended rank are read."""


class RelaySupervisor(Protocol):
    """The calls of the relay to its supervisor."""

    def on_assigned(self, rank: int) -> None: ...
    def on_gang_ended(self, reason: str) -> None: ...
    def on_stacks_wanted(self, number: int) -> None: ...
    def on_signal(self, number: int) -> None: ...
    def on_rank_failed(self, message: Message) -> None: ...
    def on_rank_refused(self, error: TritiumError) -> None: ...


class Relay:
    """The two directions of messages. `follow_coordinator` and `follow_rank` run in a thread each."""

    def __init__(self, order: Order, ending: Ending, supervisor: RelaySupervisor) -> None:
        self._order = order
        self._ending = ending
        self._supervisor = supervisor
        self._rank: Channel | None = None
        self._rows: Spooler | None = None
        self._pmi: Pmi | None = None
        self.clock = HostClock()
        self._calls: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def connect(
        self, coordinator: Client, rank: Channel, *, rows: Spooler | None, pmi: Pmi | None, gpus: Listing | None
    ) -> None:
        """Set both ends, the spooler, the server of the rank's MPI, and the GPUs that this task can see.

        To be called before the threads start.
        """
        self._coordinator, self._rank, self._rows, self._pmi, self._listing = coordinator, rank, rows, pmi, gpus

    # ---- from the coordinator

    def reach(self, on_executor: tuple[str, int] | None, who: str) -> Client:
        """Connect to the coordinator, on the driver or `on_executor`. Raises a WireError with advice."""
        address = on_executor or self._order.address
        try:
            order = self._order
            return Client(address, order.secret, who, CONNECT_SECONDS, self.at_once, order.certificate)
        except Refused:
            raise
        except WireError as error:
            tell = unreachable if on_executor is None else unreachable_executor
            raise WireError(tell(socket.gethostname(), address, CONNECT_SECONDS, error)) from error

    def follow_coordinator(self) -> None:
        """Handle the coordinator's messages until its session ends; that ends a gang that has not succeeded."""
        while (message := self._coordinator.receive()) is not None:
            self._obey(message)
        self._ending.may_leave.set()
        if not self._ending.all_finished and self._ending.reason is None:
            self._supervisor.on_gang_ended(f"the coordinator is gone (did the driver end?): {self._coordinator.reason}")

    def at_once(self, message: Message, idle: bool) -> bool:
        """Handle a message in the client's own thread, and tell whether that was done.

        `end`, `stacks`, `signal` and `clock` must not wait behind a rank that does not read. Small answers and marks
        skip a change of threads, where no earlier message is waiting (`idle`) and the rank's socket has room.
        """
        if message.kind in ("end", "stacks", "signal", "clock"):
            now = self._rank is not None
        else:
            quick = idle and message.kind in ("gathered", "mark") and len(message.blob) < SMALL
            now = quick and self._rank is not None and self._rank.has_room
        if now:
            self._obey(message)
        return now

    def _obey(self, message: Message) -> None:
        try:
            self._do(message)
        except (WireError, ValueError, TypeError, KeyError) as error:
            self._supervisor.on_gang_ended(f"the coordinator's messages can't be read: {error}")

    def _do(self, message: Message) -> None:
        if message.kind == "end":
            failed = message.fields.get("failure")
            failure = Failure.read(message["failure"], message.blob) if failed else None
            self._ending.on_end(failure, bool(message.fields.get("refused")))
            self._supervisor.on_gang_ended(message["reason"])
        elif message.kind == "stacks":
            self._supervisor.on_stacks_wanted(message["number"])
        elif message.kind == "clock":
            self.clock.on_answer(message["sent"], message["at"], time.time())
        elif message.kind == "signal":
            self._supervisor.on_signal(message["number"])
        elif message.kind == "spooled":
            assert self._rows is not None
            for name, shapes in json.loads(message.blob).items():
                self._rows.announce(name, shapes)
        elif message.kind == "dealt":
            assert self._rows is not None
            self._rows.on_dealt(message.blob)
        else:
            if message.kind == "assign":
                self._supervisor.on_assigned(message["rank"])
                if self._pmi is not None:
                    self._pmi.on_assigned(message["rank"], json.loads(message.blob))
                self._send_job()
            elif message.kind == "finished":
                self._ending.set_finished(everyone=True)
            elif message.kind == "gathered" and self._pmi is not None and message["tag"] in (BARRIER_TAG, INIT_TAG):
                self._pmi.on_gathered(message)
                return
            self._to_rank(message)

    def _send_job(self) -> None:
        certificate = self._order.certificate
        about: dict[str, Any] = {"run_dir": self._order.run_dir, "certificate": certificate and asdict(certificate)}
        for start in range(0, len(self._order.job), CHUNK):  # Arguments may exceed the limit of a message.
            self._to_rank(Message("job", about, self._order.job[start : start + CHUNK]))

    def _to_rank(self, message: Message) -> None:
        assert self._rank is not None
        try:
            self._rank.pass_on(message)
        except WireError:  # The rank has ended; the thread that waits for its process reports how.
            return

    # ---- from the rank

    def follow_rank(self) -> None:
        """Pass on the rank's messages until its end of the socket is closed."""
        assert self._rank is not None
        while (message := self._rank.receive()) is not None:
            if message.kind == "failed":
                self._supervisor.on_rank_failed(message)
                continue
            if message.kind == "calls":
                self._calls.put(message)
                continue
            if message.kind == "ready":
                if self._listing is not None:
                    assigned = self._listing.assigned()
                    message.fields.update(gpus=self._listing.uuids(), devices=assigned)
                    self._listing.watch([str(facts["uuid"]) for facts in assigned.values()])
                if self._rows is not None:
                    self._rows.ready.set()
            if message.kind == "finished":
                self._ending.set_finished(everyone=False)
            if message.kind == "spans":
                message.fields.update(self.clock.fields())
            try:
                self._coordinator.pass_on(message)
            except TooLarge as error:
                self._supervisor.on_rank_refused(error)
                return
            except WireError:  # `follow_coordinator` reports that the coordinator is gone.
                return

    def calls(self, number: int, seconds: float) -> dict[str, Any]:
        """Return the rank's answer how far it has come in its collectives; empty when none comes in so many seconds.

        number : that of this question.
        """
        assert self._rank is not None
        if not self._rank.has_room:  # It does not read, and a message for it would wait.
            return {}
        deadline = time.monotonic() + seconds
        try:
            self._rank.send("calls", number=number)
            while (answer := self._calls.get(timeout=max(0.0, deadline - time.monotonic())))["number"] != number:
                pass  # A late answer to an earlier question.
        except (WireError, queue.Empty):
            return {}
        return answer.fields

    def drain(self, is_alive: Callable[[], bool], join: Callable[[float], None]) -> None:
        """Wait until every message that the rank sent before its end is passed on, however slow the network is.

        A child of the rank may hold its end of the socket open: the wait ends when all is read.

        is_alive, join : methods of the thread in `follow_rank`.
        """
        assert self._rank is not None
        while is_alive() and not self._ending.stopped.is_set():
            if self._rank.is_silent:
                self._rank.hang_up()  # The thread passes on the messages that it has read, and ends.
            join(_LOOK_SECONDS)
