"""The control server of one run: rendezvous, row counts, logs, failure (driver, or the first supervisor).

`control/server.py` holds the connections. Most messages are handled by parts: rows, all-gathers, reports, stalls and
failures. This file keeps the members of the gang, forms it and ends it.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritium.accelerators import NONE, Accelerators
from tritium.errors import WireError
from tritium.events import (
    ConnectionRefused,
    Disconnected,
    GangFailed,
    GangFormed,
    GangRegrouped,
    Note,
    RankEnded,
    RankReported,
    Reconnected,
)
from tritium.gang.control.connection import ControlSession
from tritium.gang.control.server import Server
from tritium.gang.coordinator.all_gather import AllGathers
from tritium.gang.coordinator.first_failure import FirstFailure
from tritium.gang.coordinator.members import Member, Observer, meanwhile
from tritium.gang.coordinator.ranks import assign_ranks, assignments, device_problem
from tritium.gang.coordinator.reports import Reports, on_clock
from tritium.gang.coordinator.returned import Returned
from tritium.gang.coordinator.rows import RowCounts, Verify
from tritium.gang.coordinator.stall_alarm import StallAlarm, keep_stacks, on_status
from tritium.gang.failure import Failure
from tritium.gang.stall_limit import StallLimit
from tritium.wire import Message

if TYPE_CHECKING:
    from tritium.tls import Certificate

_DEFERRED_UNTIL_FORMED = ("rows", "few", "receipt")
REFUSALS = 200
"""So many refused connections are recorded one by one, then every 200th."""
LOST = (
    "its supervisor is gone ({why}). Its host, its network or its executor died, or Spark ended its task because it "
    "lost what the task read: see lost executors and failed fetches in the Spark UI, and launch again"
)


SupervisorSession = ControlSession[Member]


class Coordinator:
    """The control server of a gang of `size` ranks.

    Call `start`, give `address` and `secret` to the supervisors, wait on `changed` for `formed`, `finished` or
    `failure`, and call `close`.
    """

    def __init__(
        self,
        size: int,
        *,
        launch: str,
        run_id: str | None = None,
        observer: Observer,
        host: str = "127.0.0.1",
        listener: socket.socket | None = None,
        advertised: str | None = None,
        names: Sequence[str] = (),
        stream: bool = False,
        secret: bytes | None = None,
        certificate: Certificate | None = None,
        stall_limit: StallLimit | None = None,
        accelerators: Accelerators = NONE,
        verify: Verify | None = None,
        store_limit: int | None = None,
    ) -> None:
        self.size = size
        self.launch = launch
        self.run_id = run_id or launch
        self.secret = secret or secrets.token_bytes(32)
        self.certificate = certificate
        self.changed = threading.Condition()
        self.formed = False
        self.finished = False
        self.failure: Failure | None = None
        self.notice = ""
        """Why this gang is to end, once that was announced to its ranks by a "notice"."""
        self.members: dict[int, Member] = {}
        self.result_bytes = 0
        self.observer = observer
        self._ends_stalls = stall_limit is not None and stall_limit.end
        self._store_limit = store_limit
        self._accelerators = accelerators
        self._names = tuple(names)
        self._refused = 0
        self._abort_reason: str | None = None  # Kept, as a supervisor that connects later is ended, too.
        self.rows = RowCounts(self, names, stream=stream, verify=verify)
        self.all_gathers = AllGathers(self)
        self._reports = reports = Reports(self)
        self._returned = returned = Returned(self, lambda: self._alarm is not None and self._alarm.asking)
        first = FirstFailure(self, returned)
        self._alarm = None if stall_limit is None else StallAlarm(self, stall_limit, reports)
        self._handlers: dict[str, Callable[[Member, Message], None]] = {
            "ready": self._on_ready,
            "rows": self.rows.on_rows,
            "few": self.rows.on_few,
            "receipt": self.rows.on_receipt,
            "gather": self.all_gathers.on_gather,
            **dict.fromkeys(("log", "trace", "counts", "note", "checkpoint", "resumed"), reports.on_event),
            "output": reports.on_output,
            "spans": reports.on_spans,
            "clock": on_clock,
            "non_fatal_error": reports.on_non_fatal_error,
            "store": reports.on_store,
            "status": on_status,
            "stacks": self._alarm.on_stacks if self._alarm else lambda *_: None,
            "connections": returned.on_connections,
            "regroup": first.on_regroup,
            "finished": self._on_finished,
            "failed": first.on_failed,
        }
        self._server: Server[Member] = Server(
            listener or host,
            self.secret,
            on_message=self._handle,
            on_broken=self._broken,
            on_connection=self._connection,
            on_gone=self._gone,
            certificate=certificate,
        )
        bound, port = self._server.address
        self.address = (advertised or bound, port)
        self._thread = threading.Thread(target=self._serve, name=f"tritium-coordinator-{launch}", daemon=True)

    # ---- Called by other threads

    def start(self) -> Coordinator:
        """Start serving, in a thread."""
        if self._alarm is not None:
            self._alarm.start()
        if self._ends_stalls:
            self._returned.start()
        self._thread.start()
        return self

    def abort(self, reason: str) -> None:
        """End every rank at once, without recording a failure (Ctrl-C, a cancelled job)."""

        def aborted() -> None:
            self._abort_reason = reason
            self.broadcast("end", reason=reason)

        self._server.call(aborted)

    def fail(self, failure: Failure) -> None:
        """Record a failure that was found elsewhere, and end every rank."""

        def failed() -> None:
            keep_stacks(self, failure)
            self.end(failure)

        self._server.call(failed)

    def no_one_returns(self) -> None:
        """Give up supervisors without a connection at once, not after `session.LOST` seconds, as their tasks end."""
        self._server.call(self._server.refuse_reconnects)

    def tell_all(self, kind: str, **fields: Any) -> None:
        """Send every supervisor "more" (there are slots for a larger gang), a "notice", or a "signal" for its rank."""
        self._server.call(lambda: self.broadcast(kind, **fields))

    def missing(self) -> list[int]:
        """List the partitions whose supervisors have not reported, or whose rank processes are not ready."""
        return [p for p in range(self.size) if p not in self.members or not self.members[p].ready]

    def await_gone(self, seconds: float, but: int = 0) -> None:
        """Wait, up to `seconds`, until at most `but` supervisors are connected, so that no message is missed."""
        with self.changed:
            self.changed.wait_for(
                lambda: sum(s.connection is not None for s in list(self._server.sessions.values())) <= but, seconds
            )

    def close(self) -> None:
        """Stop serving, and close every connection."""
        if self._thread.is_alive():
            self._server.call(self._server.stop)
            self._thread.join()
        else:
            self._server.release()

    def _serve(self) -> None:
        try:
            self._server.serve()
        except Exception as error:  # noqa: BLE001 - after any error the run must end, and say why
            self.failure = self.failure or Failure.of_coordinator(error)
        finally:
            self._server.release()
            self._reports.show_early_output()
            self.notify()

    # ---- Connections

    def _broken(self, session: SupervisorSession | None, error: Exception) -> None:
        """Record a refused connection. End the gang if it was a member's, whose message can't be handled."""
        if session is not None and session.owner is not None:
            member = session.owner
            self.fail_member(member, error)
        self._refuse(str(error))

    def _refuse(self, reason: str) -> None:
        self._refused += 1
        # A peer without the secret must not fill the disk.
        if self._refused <= REFUSALS or self._refused % REFUSALS == 0:
            self.observer.event(ConnectionRefused(reason=reason, number=self._refused))

    def _connection(self, session: SupervisorSession) -> None:
        self.notify()
        if session.owner is not None:
            changed = Disconnected if session.connection is None else Reconnected
            self.observer.event(changed(rank=session.owner.best_number, host=session.owner.host))

    def _gone(self, session: SupervisorSession) -> None:
        self.notify()
        member = session.owner
        if member is not None and not member.finished and not self.finished:
            self._lost(member, str(session.closed))

    def _lost(self, member: Member, why: str) -> None:
        text = LOST.format(why=why)
        self.end(Failure(how="lost", rank=member.best_number, host=member.host, pid=member.pid, text=text))

    def broadcast(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        """Send a message to every supervisor."""
        for session in list(self._server.sessions.values()):
            if session.owner is not None:
                session.send(kind, blob, **fields)

    def notify(self) -> None:
        """Have threads that wait for `changed` look again."""
        with self.changed:
            self.changed.notify_all()

    # ---- Messages

    def _handle(self, session: SupervisorSession, message: Message) -> None:
        if message.kind == "hello":
            self._hello(session, message)
            return
        if session.owner is None:
            raise WireError(f"A {message.kind!r} message came before its sender said hello.")
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise WireError(f"There is no message {message.kind!r}.")
        if message.kind in _DEFERRED_UNTIL_FORMED and not self.formed:
            session.owner.early.append(message)
            return
        handler(session.owner, message)

    def _hello(self, session: SupervisorSession, message: Message) -> None:
        member = Member.read(message.fields)
        earlier = self.members.get(member.partition)
        returned = earlier is not None and earlier.attempt != member.attempt and message["launch"] == self.launch
        if earlier is not None and returned and earlier.session.connection is None:
            why = f"Spark has started its task again, as attempt {member.attempt}"
            self._server.give_up(earlier.session, why)
            self._lost(earlier, why)  # A finished rank, too, as its result is lost with the task.
        if message["launch"] != self.launch:
            refusal = f"this is launch {self.launch}, not {message['launch']}"
        elif self.failure is not None:
            refusal = f"the run has ended: {self.failure.headline()}"
        elif self._abort_reason is not None:
            refusal = f"the run has ended: {self._abort_reason}"
        elif earlier is not None:
            refusal = f"partition {member.partition} has reported already (attempt {earlier.attempt})"
        elif not 0 <= member.partition < self.size:
            refusal = f"there is no partition {member.partition} among {self.size}"
        else:
            session.owner = self.members[member.partition] = member
            member.session = session
            self.observer.event(RankReported(partition=member.partition, host=member.host, pid=member.pid))
            return
        self._refuse(f"A late supervisor on {member.host}: {refusal}.")
        session.send("end", reason=refusal, refused=self.failure is None and self._abort_reason is None)
        self._server.give_up(session, refusal)

    def _on_ready(self, member: Member, message: Message) -> None:
        member.ready = True
        member.pid = int(message["pid"])
        member.listed = {str(k): str(v) for k, v in message.fields.get("gpus", {}).items()}
        member.facts = message.fields.get("devices", {})
        if len(self.members) == self.size and all(m.ready for m in self.members.values()):
            self._form()

    def _form(self) -> None:
        problem = device_problem(list(self.members.values()), self._accelerators)
        if problem is not None:
            first = self.members[0]
            self.fail_member(first, problem)
            return
        gang = assign_ranks(list(self.members.values()))
        peers = [m.peer(self._accelerators) for m in gang]
        everyone = json.dumps(peers).encode()  # Made once for all ranks: 2,048 of them take 230 kB.
        for m, place in assignments(gang, self._accelerators):
            facts = {"names": self._names, "run_id": self.run_id, "store_limit": self._store_limit}
            m.session.send("assign", everyone, **facts, **place)
        self.formed = True
        self.observer.event(GangFormed(peers=peers))
        if (sharers := self._accelerators.sharers) > 1:
            self.observer.event(Note(text=f"gpus={self._accelerators.amount:g}: {sharers} ranks share a device"))
        self._reports.show_early_output()
        for m in gang:
            for early in m.early:
                self._handle(m.session, early)
        self.notify()

    def _on_finished(self, member: Member, message: Message) -> None:
        member.finished = True
        self.result_bytes += int(message.fields.get("bytes", 0))
        self.observer.event(RankEnded(rank=member.number))
        self.all_gathers.leave(member)
        if all(m.finished for m in self.members.values()) and self.formed:
            self.finished = True
            self.broadcast("finished")
            self.notify()

    def end(self, failure: Failure) -> None:
        """End the gang with this failure, unless it has failed already, or is being ended from outside."""
        if self.failure is not None or self._abort_reason is not None:
            return
        others = failure.others or meanwhile(self.members.values(), failure.rank)
        failure = self.failure = replace(failure, others=others)
        self.observer.event((GangFailed if failure.how != "regroup" else GangRegrouped)(**failure.fields()))
        self.broadcast("end", failure.pickled, reason=failure.headline(), failure=failure.with_stacks())
        self._reports.show_early_output()
        self.notify()

    def fail_member(self, member: Member, problem: Exception) -> None:
        """End the gang with an error of one rank."""
        self.end(Failure.of(problem, member.best_number, host=member.host, pid=member.pid))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have the server's thread call this after `seconds`."""
        self._server.after(seconds, call)
