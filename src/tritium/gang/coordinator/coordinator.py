"""The control server of one run: rendezvous, row counts, logs, failure (driver, or the first supervisor).

`server.py` holds the connections and `muster.py` decides who is who; this file is what messages mean.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tritium.data.fingerprint import Part, added, table
from tritium.data.watermark import WatermarkTracker
from tritium.errors import TritiumError, WireError
from tritium.gang.control.server import Server, Session
from tritium.gang.coordinator.gpu_sharing import shared
from tritium.gang.coordinator.rendezvous import Member, Rendezvous, agree, assignments, muster
from tritium.gang.coordinator.stall_watch import StallWatch
from tritium.gang.coordinator.stalls import Patience, Standing
from tritium.gang.driver.error_text import meanwhile
from tritium.gang.failure import Aside, Failure
from tritium.observe.stored import Piece
from tritium.wire import Message

STACKS_SECONDS = 3.0  # how long supervisors have to answer with stacks
ECHO_SECONDS = 0.7  # how long a failure that may be an echo waits for the death that caused it
AWAY_SECONDS = 0.1  # how often it is looked whether a supervisor without a connection is lost, or back
MARK_SECONDS = 0.05  # so far apart are the marks that ranks are sent: ends that come together are told together
REFUSALS = 200  # so many are recorded one by one, and every so many after that
LOST = (
    "its supervisor is gone ({why}). Its host, its network or its executor died, or Spark ended its task because it "
    "lost what the task read: see lost executors and failed fetches in the Spark UI, and launch again"
)


class Observer(Protocol):
    """What the coordinator tells of the run. Called from the coordinator's thread."""

    def event(self, kind: str, **fields: Any) -> None: ...
    def output(self, rank: int, text: str) -> None: ...
    def store(self, piece: Piece) -> None: ...


SupervisorSession = Session[Member]


class Coordinator:
    """Serves a gang of `size`. `start()` it, give `address` to the supervisors, wait on `changed`, `close()` it."""

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
        patience: Patience | None = None,
        prove: Callable[[Mapping[str, Any]], Exception | None] | None = None,
        store_limit: int | None = None,
    ) -> None:
        self.size = size
        self.launch = launch
        self.run_id = run_id or launch
        self.secret = secret or secrets.token_bytes(32)
        self.changed = threading.Condition()
        self.formed = False
        self.finished = False
        self.failure: Failure | None = None
        self.members: dict[int, Member] = {}
        self.receipts: dict[int, dict[str, Any]] = {}
        self.result_bytes = 0  # of all ranks that have returned
        self._observer = observer
        self._prove = prove  # whether rows of this fingerprint may be trained on
        self._stream = stream
        self._store_limit = store_limit  # bytes of all files that ranks can store; None: any
        self._names = tuple(names)
        self._keepers = {name: WatermarkTracker(size) for name in names}
        self._marked: dict[str, float] = {}  # when ranks were told of a mark last
        self._marking: set[str] = set()  # of what they will be told soon
        self._refused = 0
        self._rendezvous: dict[tuple[str, int], Rendezvous] = {}
        self._doubtful: list[Failure] = []
        self._asides: list[Aside] = []
        self._storing: dict[str, int] = {}  # which rank is in the middle of which file
        self._watch = None if patience is None else StallWatch(patience, size)
        self._server: Server[Member] = Server(
            listener or host,
            self.secret,
            on_message=self._handle,
            on_broken=self._broken,
            on_connection=self._connection,
            on_gone=self._gone,
        )
        bound, port = self._server.address
        self.address = (advertised or bound, port)
        self._thread = threading.Thread(target=self._serve, name=f"tritium-coordinator-{launch}", daemon=True)

    # ---- what other threads call

    def start(self) -> Coordinator:
        """Begin to serve."""
        if self._watch is not None:
            self._server.after(self._watch.seconds, self._look)
        self._thread.start()
        return self

    def abort(self, reason: str) -> None:
        """End every rank at once, without a failure of any of them (Ctrl-C, a cancelled job)."""
        self._server.call(lambda: self._broadcast("end", reason=reason))

    def fail(self, failure: Failure) -> None:
        """Record a failure that the coordinator can't see itself, and end every rank."""

        def failed() -> None:
            self._keep_stacks(failure)
            self._failed(failure)

        self._server.call(failed)

    def no_one_returns(self) -> None:
        """The supervisors' tasks are ending: who has no connection is lost at once, not only after a while."""
        self._server.call(self._server.lose_patience)

    def offer_more(self) -> None:
        """Tell every rank that the gang could be larger now."""
        self._server.call(lambda: self._broadcast("more"))

    def missing(self) -> list[int]:
        """The partitions whose supervisors have not reported, or whose rank processes are not ready."""
        return [p for p in range(self.size) if p not in self.members or not self.members[p].ready]

    def await_gone(self, seconds: float, but: int = 0) -> None:
        """Wait until every supervisor, `but` so many, has closed its connection, so that nothing it said is missed."""
        with self.changed:
            self.changed.wait_for(
                lambda: sum(s.link is not None for s in list(self._server.sessions.values())) <= but, seconds
            )

    def close(self) -> None:
        """Stop serving; every connection is closed."""
        if self._thread.is_alive():
            self._server.call(self._server.stop)
            self._thread.join()
        else:
            self._server.release()

    def _serve(self) -> None:
        try:
            self._server.serve()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run must end, and say why
            self.failure = self.failure or Failure.of_coordinator(error)
        finally:
            self._server.release()
            self._notify()

    # ---- connections

    def _broken(self, session: SupervisorSession | None, error: Exception) -> None:
        """A stranger, or bytes that are no message: this connection ends, and the run goes on without it."""
        if session is not None and session.owner is not None:  # one of ours: what it asked for can't be done
            member = session.owner
            self._failed(Failure.of(error, member.best_number, host=member.host, pid=member.pid))
        self._refuse(str(error))

    def _refuse(self, reason: str) -> None:
        self._refused += 1
        if self._refused <= REFUSALS or self._refused % REFUSALS == 0:  # a stranger must not fill the disk
            self._observer.event("refused", reason=reason, number=self._refused)

    def _connection(self, session: SupervisorSession) -> None:
        self._notify()
        if session.owner is not None:
            kind = "disconnected" if session.link is None else "reconnected"
            self._observer.event(kind, rank=session.owner.best_number, host=session.owner.host)

    def _gone(self, session: SupervisorSession) -> None:
        self._notify()
        member = session.owner
        if member is not None and not member.finished and not self.finished:
            self._lost(member, str(session.over))

    def _lost(self, member: Member, why: str) -> None:
        text = LOST.format(why=why)
        self._failed(Failure(how="lost", rank=member.best_number, host=member.host, pid=member.pid, text=text))

    def _broadcast(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        for session in list(self._server.sessions.values()):
            if session.owner is not None:
                session.send(kind, blob, **fields)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    # ---- messages

    def _handle(self, session: SupervisorSession, message: Message) -> None:
        if message.kind == "hello":
            self._hello(session, message)
            return
        if session.owner is None:
            raise WireError(f"A {message.kind!r} message came before its sender said hello.")
        handler = getattr(self, f"_on_{message.kind}", None)
        if handler is None:
            raise WireError(f"There is no message {message.kind!r}.")
        handler(session.owner, message)

    def _hello(self, session: SupervisorSession, message: Message) -> None:
        member = Member.read(message.fields)
        earlier = self.members.get(member.partition)
        returned = earlier is not None and earlier.attempt != member.attempt and message["launch"] == self.launch
        if earlier is not None and returned and earlier.link.link is None:
            why = f"Spark has started its task again, as attempt {member.attempt}"
            self._server.give_up(earlier.link, why)
            self._lost(earlier, why)  # what its rank returned has not come through, though it had finished
        if message["launch"] != self.launch:
            refusal = f"this is launch {self.launch}, not {message['launch']}"
        elif self.failure is not None:
            refusal = f"the run has ended: {self.failure.headline()}"
        elif earlier is not None:
            refusal = f"partition {member.partition} has reported already (attempt {earlier.attempt})"
        elif not 0 <= member.partition < self.size:
            refusal = f"there is no partition {member.partition} among {self.size}"
        else:
            session.owner = self.members[member.partition] = member
            member.link = session
            self._observer.event("reported", partition=member.partition, host=member.host, pid=member.pid)
            return
        self._refuse(f"A late supervisor on {member.host}: {refusal}.")
        session.send("end", reason=refusal, refused=self.failure is None)
        self._server.give_up(session, refusal)

    def _on_ready(self, member: Member, message: Message) -> None:
        member.ready = True
        member.pid = int(message["pid"])
        member.listed = {str(k): str(v) for k, v in message.fields.get("gpus", {}).items()}
        if len(self.members) == self.size and all(m.ready for m in self.members.values()):
            self._form()

    def _form(self) -> None:
        problem = shared(list(self.members.values()))
        if problem is not None:
            first = self.members[0]
            self._failed(Failure.of(problem, first.best_number, host=first.host, pid=first.pid))
            return
        gang = muster(list(self.members.values()))
        peers = [m.peer() for m in gang]
        everyone = json.dumps(peers).encode()  # once for all: with 2,048 ranks it is 230 kB
        for m, place in assignments(gang):
            facts = {"names": self._names, "run_id": self.run_id, "store_limit": self._store_limit, **place}
            m.link.send("assign", everyone, **facts)
        self.formed = True
        self._observer.event("formed", peers=peers)
        for m in gang:
            for text in m.early_output:
                self._observer.output(m.number, text)
            for early in m.early:
                self._handle(m.link, early)
        self._notify()

    def _formed_or_keep(self, member: Member, message: Message) -> bool:
        """Rows may be there before ranks have their numbers; such messages wait until then."""
        if not self.formed:
            member.early.append(message)
        return self.formed

    def _on_rows(self, member: Member, message: Message) -> None:
        if self._formed_or_keep(member, message):
            for name, rows in message["rows"].items():
                self._observer.event("rows", name=name, rank=member.number, rows=rows, ended=False)
                if self._stream:
                    self._mark(name, member.number, int(rows), ended=False)

    def _on_receipt(self, member: Member, message: Message) -> None:
        if not self._formed_or_keep(member, message):
            return
        self.receipts[member.number] = {"rows": message["rows"], **json.loads(message.blob)}
        for name, rows in message["rows"].items():
            self._observer.event("rows", name=name, rank=member.number, rows=rows, ended=True)
        if len(self.receipts) == self.size:
            shapes, ragged = agree({r: receipt["columns"] for r, receipt in self.receipts.items()})
            whole = received(self.receipts)
            problem = ragged or (self._prove(whole["fingerprint"]) if self._prove else None)
            if problem is not None:
                self._failed(Failure.of(problem, member.number, host=member.host, pid=member.pid))
                return
            self._observer.event("received", **whole)
            self._broadcast("spooled", json.dumps(shapes).encode())
            self._broadcast("fingerprint", json.dumps(whole["fingerprint"]).encode())  # before the last mark
        for name, rows in message["rows"].items():
            self._mark(name, member.number, int(rows), ended=True)

    def _mark(self, name: str, rank: int, rows: int, *, ended: bool) -> None:
        keeper = self._keepers[name]
        if not keeper.report(rank, rows, ended) or not (self._stream or keeper.complete):
            return
        if keeper.complete or time.monotonic() - self._marked.get(name, 0.0) >= MARK_SECONDS:
            self._tell_mark(name)
        elif name not in self._marking:
            self._marking.add(name)
            self._server.after(MARK_SECONDS, lambda: self._tell_mark(name))

    def _tell_mark(self, name: str) -> None:
        """What has changed since every rank was told last; sessions see to it that each of them gets all of it."""
        self._marking.discard(name)
        mark = self._keepers[name].change()
        if mark is not None:
            self._marked[name] = time.monotonic()
            self._broadcast("mark", name=name, rows=mark.rows, ended=list(mark.ended.items()))

    def _on_log(self, member: Member, message: Message) -> None:
        self._observer.event("log", rank=member.number, **message.fields)

    def _on_trace(self, member: Member, message: Message) -> None:
        self._observer.event("trace", rank=member.number, **message.fields)

    def _on_regroup(self, member: Member, message: Message) -> None:
        self._failed(Failure(how="regroup", rank=member.number, host=member.host, pid=member.pid))

    def _on_counts(self, member: Member, message: Message) -> None:
        self._observer.event("counts", rank=member.number, name=message["name"], **message["counts"])

    def _on_output(self, member: Member, message: Message) -> None:
        text = message.blob.decode("utf-8", "replace")
        if member.rank is None:
            member.early_output.append(text)
        else:
            self._observer.output(member.rank, text)

    def _on_store(self, member: Member, message: Message) -> None:
        if self.failure is not None:  # the gang is being ended; what was stored by half is removed
            return
        piece = Piece.read(message.fields, message.blob)
        name = piece.name
        owner = self._storing.setdefault(name, member.number)
        if owner != member.number:
            problem = TritiumError(
                f"Ranks {owner} and {member.number} both store {name!r} at the same time: their pieces would mix. Let "
                f"one of them store it, or give each a name of its own, such as f'{{world.rank}}-{name}'."
            )
            self._failed(Failure.of(problem, member.number, host=member.host, pid=member.pid))
            return
        if piece.last:
            del self._storing[name]
        try:
            self._observer.store(piece)
        except TritiumError as error:  # its rank has sent it, and waits for no answer
            self._failed(Failure.of(error, member.number, host=member.host, pid=member.pid))

    def _on_gather(self, member: Member, message: Message) -> None:
        lane, number = str(message.fields.get("lane", "main")), int(message["number"])
        meeting = self._rendezvous.setdefault((lane, number), Rendezvous(number, self.size, lane))
        meeting.add(member.number, message)
        if meeting.problem is None:
            meeting.problem = meeting.left_by([m.number for m in self.members.values() if m.finished])
        if meeting.problem is not None or meeting.full:
            self._conclude(meeting)
        if meeting.full:
            del self._rendezvous[lane, number]

    def _conclude(self, meeting: Rendezvous) -> None:
        """Tell those who have come, and have not heard it yet, what came of it."""
        blob, fields = meeting.outcome()
        for member in self.members.values():
            if member.number in meeting.values and member.number not in meeting.told:
                meeting.told.add(member.number)
                member.link.send("gathered", blob, **fields)

    def _on_note(self, member: Member, message: Message) -> None:
        self._observer.event("note", text=str(message["text"]))

    def _on_aside(self, member: Member, message: Message) -> None:
        facts = {name: str(message[name]) for name in ("where", "type", "text", "traceback")}
        told = Aside(member.number, member.host, int(message["pid"]), late=self.finished, **facts)
        self._asides.append(told)
        self._observer.event("aside", **vars(told))
        self._observer.event("note", text=told.headline())

    def _on_checkpoint(self, member: Member, message: Message) -> None:
        facts = {name: message[name] for name in ("step", "bytes", "seconds", "path")}
        self._observer.event("checkpoint", rank=member.number, **facts)

    def _on_resumed(self, member: Member, message: Message) -> None:
        self._observer.event("resumed", step=message["step"], path=message["path"])

    def _on_finished(self, member: Member, message: Message) -> None:
        member.finished = True
        self.result_bytes += int(message.fields.get("bytes", 0))
        self._observer.event("rank_ended", rank=member.number)
        for meeting in list(self._rendezvous.values()):
            meeting.problem = meeting.problem or meeting.left_by([member.number])
            if meeting.problem is not None:
                self._conclude(meeting)
        if all(m.finished for m in self.members.values()) and self.formed:
            self.finished = True
            self._broadcast("finished")
            self._notify()

    def _on_failed(self, member: Member, message: Message) -> None:
        fields = {**message.fields, "rank": member.best_number}
        failure = Failure.read(fields, message.blob)
        if not failure.doubt or self.size == 1:
            self._failed(failure)
            return
        if not self._doubtful:
            self._server.after(ECHO_SECONDS, self._settle)
        self._doubtful.append(failure)

    def _settle(self) -> None:
        """No death has explained what looked like its echo: then that is the failure, the least doubtful one first.

        A rank whose supervisor has no connection may have died with it: it comes back first, or is lost.
        """
        blamed = {failure.rank for failure in self._doubtful}
        others = [m for m in self.members.values() if m.best_number not in blamed]
        if any(m.link.link is None and m.link.over is None for m in others) and self.failure is None:
            self._server.after(AWAY_SECONDS, self._settle)
            return
        self._failed(min(self._doubtful, key=lambda failure: failure.doubt))

    # ---- no progress

    def _on_pulse(self, member: Member, message: Message) -> None:
        member.standing = Standing.read(message.fields, time.monotonic())

    def _look(self) -> None:
        """Again and again: does a rank stand still? Then every supervisor is asked for its rank's stacks.

        Once every function has returned, results can't be lost any more: supervisors limit what a rank does then.
        """
        assert self._watch is not None
        if self.finished:
            return
        self._server.after(self._watch.seconds, self._look)
        if self.formed and self.failure is None and self._watch.look(self.members.values(), time.monotonic()):
            number = self._watch.ask()
            self._broadcast("stacks", number=number)
            self._server.after(STACKS_SECONDS, lambda: self._tell_stall(number))

    def _on_stacks(self, member: Member, message: Message) -> None:
        watch = self._watch
        if watch is not None and watch.take(int(message["number"]), member.number, message):
            self._tell_stall(int(message["number"]))

    def _tell_stall(self, number: int) -> None:
        if self._watch is None or self.failure is not None or self.finished:
            return
        found = self._watch.conclude(number, self.members.values(), time.monotonic())
        if found is None:  # told already, or the ranks have moved on meanwhile
            return
        failure, certain = found
        if self._asides:
            before = "\n".join(f"  {aside.headline()}" for aside in self._asides)
            failure = replace(failure, text=f"{failure.text}\n\nBefore that:\n{before}")
        self._keep_stacks(failure)
        if self._watch.patience.end and certain:
            self._failed(failure)
            return
        self._observer.event("stalled", **failure.fields())
        self._observer.event("note", text=failure.text)

    def _keep_stacks(self, failure: Failure) -> None:
        try:
            for rank, text in sorted(failure.stacks.items()):
                self._observer.store(Piece.whole(f"stacks/rank-{rank}.txt", text.encode("utf-8", "replace")))
        except Exception as error:  # noqa: BLE001 - a full disk, a store that is gone: the stall is what matters
            self._observer.event("note", text=f"the stacks can't be kept in the run directory: {error}")

    def _failed(self, failure: Failure) -> None:
        if self.failure is not None:
            return
        others = failure.others or meanwhile(self.members.values(), failure.rank)
        failure = self.failure = replace(failure, others=others)
        self._observer.event("failed" if failure.how != "regroup" else "regroup", **failure.fields())
        self._broadcast("end", failure.pickled, reason=failure.headline(), failure=failure.with_stacks())
        self._notify()


def received(receipts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Rows per rank of every name, and the fingerprints of the ranks added up to that of the whole exchange."""
    rows: dict[str, list[int]] = {}
    prints: dict[str, dict[int, Part]] = {}
    for _, receipt in sorted(receipts.items()):
        for name, count in receipt["rows"].items():
            rows.setdefault(name, []).append(count)
        for name, parts in receipt["fingerprint"].items():
            for partition, *part in parts:
                whole = prints.setdefault(name, {})
                whole[partition] = added(whole.get(partition, (0, 0, 0)), part)
    return {"rows": rows, "fingerprint": {name: table(parts) for name, parts in prints.items()}}
