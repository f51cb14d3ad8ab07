"""The control server of one run: rendezvous, row counts, logs, failure (driver, or the first supervisor).

One thread and a selector serve every supervisor. Decisions about the gang are in `muster.py`; this file moves messages.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tritium.data.watermark import MarkKeeper
from tritium.errors import TritiumError, WireError
from tritium.gang.failure import Failure
from tritium.gang.muster import Member, Rendezvous, agree, muster
from tritium.wire import Challenge, Codec, Message

HANDSHAKE_SECONDS = 10.0
ECHO_SECONDS = 0.7  # how long an exception that looks like an echo waits for the death that caused it
LOST = (
    "the connection to its supervisor broke. Its executor died, or Spark ended its task because it lost what the task "
    "read: see lost executors and failed fetches in the Spark UI, and launch again"
)
STRANGERS = 256  # connections that have not yet proved themselves, at most


class Observer(Protocol):
    """What the coordinator tells of the run. Called from the coordinator's thread."""

    def event(self, kind: str, **fields: Any) -> None: ...
    def output(self, rank: int, text: str) -> None: ...
    def store(self, name: str, chunk: bytes, last: bool) -> None: ...


class _Link:
    """One connection, from the challenge on."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.socket = sock
        self.challenge: Challenge | None = Challenge(secret)
        self.packet = b""
        self.codec_in = self.codec_out = Codec(None, b"")
        self.out: deque[memoryview] = deque()
        self.member: Member | None = None
        self.closing = False
        self.open = True

    def queue(self, *parts: bytes) -> None:
        self.out.extend(memoryview(p) for p in parts if p)


class Coordinator:
    """Serves a gang of `size`. `start()` it, give `address` to the supervisors, wait on `changed`, `close()` it."""

    def __init__(
        self,
        size: int,
        *,
        launch: str,
        observer: Observer,
        host: str = "127.0.0.1",
        names: Sequence[str] = (),
        stream: bool = False,
        secret: bytes | None = None,
    ) -> None:
        self.size = size
        self.launch = launch
        self.secret = secret or secrets.token_bytes(32)
        self.changed = threading.Condition()
        self.formed = False
        self.finished = False
        self.failure: Failure | None = None
        self.members: dict[int, Member] = {}
        self.receipts: dict[int, dict[str, Any]] = {}
        self._observer = observer
        self._stream = stream
        self._names = tuple(names)
        self._keepers = {name: MarkKeeper(size) for name in names}
        self._rendezvous: dict[int, Rendezvous] = {}
        self._links: dict[int, _Link] = {}
        self._strangers = 0
        self._storing: dict[str, int] = {}  # which rank is in the middle of which file
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server((host, 0), backlog=1024)
        self._server.setblocking(False)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._running = True
        self._thread = threading.Thread(target=self._serve, name=f"tritium-coordinator-{launch}", daemon=True)

    # ---- what other threads call

    def start(self) -> Coordinator:
        """Begin to serve."""
        self._thread.start()
        return self

    def abort(self, reason: str) -> None:
        """End every rank at once, without a failure of any of them (Ctrl-C, a cancelled job)."""
        self._call(lambda: self._broadcast("end", reason=reason))

    def fail(self, failure: Failure) -> None:
        """Record a failure that the coordinator can't see itself, and end every rank."""
        self._call(lambda: self._failed(failure))

    def missing(self) -> list[int]:
        """The partitions whose supervisors have not reported, or whose rank processes are not ready."""
        return [p for p in range(self.size) if p not in self.members or not self.members[p].ready]

    def await_gone(self, seconds: float) -> None:
        """Wait until every supervisor has closed its connection, so that nothing it said is missed."""
        with self.changed:
            self.changed.wait_for(lambda: not any(link.member for link in list(self._links.values())), seconds)

    def close(self) -> None:
        """Stop serving; every connection is closed."""
        if self._thread.is_alive():
            self._call(self._stop)
            self._thread.join()
        else:
            self._release()

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        try:
            self._waker.send(b"!")
        except OSError:  # already closed: there is no one left to tell
            return

    # ---- the loop

    def _serve(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - a full disk under the observer, say: the run must end, and say why
            self.failure = self.failure or Failure.of(error, -1, host=socket.gethostname(), pid=os.getpid())
        finally:
            self._release()
            self._notify()

    def _loop(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        while self._running:
            wait = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, events in self._selector.select(wait):
                if key.fileobj is self._server:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                else:
                    self._attend(key.data, events)
            while self._calls:
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def _stop(self) -> None:
        self._running = False
        for link in list(self._links.values()):  # what is queued still leaves, as far as the sockets take it
            self._flush(link)

    def _release(self) -> None:
        for link in list(self._links.values()):
            link.socket.close()
        self._links.clear()
        for sock in (self._server, self._woken, self._waker):
            sock.close()
        self._selector.close()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._ticket), call))

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:  # the client was gone again, or this process is out of file descriptors
            return
        if self._strangers >= STRANGERS:  # the oldest goes: one of ours would have proved itself by now
            self._drop(next(link for link in self._links.values() if link.challenge))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link = _Link(sock, self.secret)
        self._strangers += 1
        self._links[sock.fileno()] = link
        self._selector.register(sock, selectors.EVENT_READ, link)
        assert link.challenge is not None
        link.queue(link.challenge.greeting)
        self._flush(link)
        self._after(HANDSHAKE_SECONDS, lambda: self._drop(link) if link.challenge else None)

    def _attend(self, link: _Link, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(link)
        if not events & selectors.EVENT_READ or not link.open:
            return
        try:
            data = link.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(link)
            return
        try:
            if link.challenge is not None:
                data = self._admit(link, data)
            for message in link.codec_in.feed(data) if link.challenge is None else ():
                self._handle(link, message)
        except (WireError, ValueError, TypeError, KeyError) as error:
            if link.member is not None:  # one of ours: what it asked for can't be done
                rank = link.member.partition if link.member.rank is None else link.member.rank
                self._failed(Failure.of(error, rank, host=link.member.host, pid=link.member.pid))
            # A stranger, or bytes that are no message: this connection ends, the run goes on without it.
            self._observer.event("refused", reason=str(error))
            self._drop(link)

    def _admit(self, link: _Link, data: bytes) -> bytes:
        assert link.challenge is not None
        link.packet += data
        if len(link.packet) < Challenge.size:
            return b""
        reply, key = link.challenge.answer(link.packet[: Challenge.size])
        rest, link.packet = link.packet[Challenge.size :], b""
        link.challenge = None
        self._strangers -= 1
        link.codec_in, link.codec_out = Codec(key, b"c"), Codec(key, b"s")
        link.queue(reply)
        self._flush(link)
        return rest

    def _flush(self, link: _Link) -> None:
        try:
            while link.out:
                sent = link.socket.send(link.out[0])
                if sent == len(link.out[0]):
                    link.out.popleft()
                else:
                    link.out[0] = link.out[0][sent:]
        except BlockingIOError:
            pass  # the selector says when there is room again
        except OSError:
            self._drop(link)
            return
        if link.closing and not link.out:
            self._drop(link)
        elif link.open:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.out else 0)
            if self._selector.get_key(link.socket).events != wanted:
                self._selector.modify(link.socket, wanted, link)

    def _drop(self, link: _Link) -> None:
        if not link.open:
            return
        link.open = False
        self._links.pop(link.socket.fileno(), None)
        self._selector.unregister(link.socket)
        link.socket.close()
        if link.challenge is not None:
            self._strangers -= 1
        self._notify()
        member = link.member
        if member is not None and not member.finished and not self.finished:
            rank = member.partition if member.rank is None else member.rank
            self._failed(Failure(how="lost", rank=rank, host=member.host, pid=member.pid, text=LOST))

    def _send(self, link: _Link, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        if link.open:
            link.queue(*link.codec_out.encode(Message(kind, fields, blob)))
            self._flush(link)

    def _broadcast(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        for link in list(self._links.values()):
            if link.member is not None:
                self._send(link, kind, blob, **fields)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    # ---- messages

    def _handle(self, link: _Link, message: Message) -> None:
        if message.kind == "hello":
            self._hello(link, message)
            return
        if link.member is None:
            raise WireError(f"A {message.kind!r} message came before its sender said hello.")
        handler = getattr(self, f"_on_{message.kind}", None)
        if handler is None:
            raise WireError(f"There is no message {message.kind!r}.")
        handler(link.member, message)

    def _hello(self, link: _Link, message: Message) -> None:
        member = Member.read(message.fields)
        earlier = self.members.get(member.partition)
        if message["launch"] != self.launch:
            refusal = f"this is launch {self.launch}, not {message['launch']}"
        elif earlier is not None:
            refusal = f"partition {member.partition} has reported already (attempt {earlier.attempt})"
        elif not 0 <= member.partition < self.size:
            refusal = f"there is no partition {member.partition} among {self.size}"
        elif self.failure is not None:
            refusal = f"the run has ended: {self.failure.headline()}"
        else:
            link.member = self.members[member.partition] = member
            member.link = link
            self._observer.event("reported", partition=member.partition, host=member.host, pid=member.pid)
            return
        self._observer.event("refused", reason=f"A late supervisor on {member.host}: {refusal}.")
        self._send(link, "end", reason=refusal)
        link.closing = True
        self._flush(link)

    def _on_ready(self, member: Member, message: Message) -> None:
        member.ready = True
        member.pid = int(message["pid"])
        if len(self.members) == self.size and all(m.ready for m in self.members.values()):
            self._form()

    def _form(self) -> None:
        gang = muster(list(self.members.values()))
        peers = [m.peer() for m in gang]
        for m in gang:
            self._send(m.link, "assign", names=self._names, run_id=self.launch, **m.assignment(gang, peers))
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
            shapes, problem = agree({r: receipt["columns"] for r, receipt in self.receipts.items()})
            if problem is not None:
                self._failed(Failure.of(problem, member.number, host=member.host, pid=member.pid))
                return
            self._observer.event("received", **received(self.receipts))
            self._broadcast("spooled", json.dumps(shapes).encode())
        for name, rows in message["rows"].items():
            self._mark(name, member.number, int(rows), ended=True)

    def _mark(self, name: str, rank: int, rows: int, *, ended: bool) -> None:
        mark = self._keepers[name].report(rank, rows, ended)
        if mark is not None and (self._stream or mark.complete):
            self._broadcast("mark", name=name, rows=mark.rows, ended=list(mark.ended.items()))

    def _on_log(self, member: Member, message: Message) -> None:
        self._observer.event("log", rank=member.number, **message.fields)

    def _on_counts(self, member: Member, message: Message) -> None:
        self._observer.event("counts", rank=member.number, name=message["name"], **message["counts"])

    def _on_output(self, member: Member, message: Message) -> None:
        text = message.blob.decode("utf-8", "replace")
        if member.rank is None:
            member.early_output.append(text)
        else:
            self._observer.output(member.rank, text)

    def _on_store(self, member: Member, message: Message) -> None:
        name, last = str(message["name"]), bool(message["last"])
        owner = self._storing.setdefault(name, member.number)
        if owner != member.number:
            problem = TritiumError(
                f"Ranks {owner} and {member.number} both store {name!r} at the same time: their pieces would mix. Let "
                f"one of them store it, or give each a name of its own, such as f'{{world.rank}}-{name}'."
            )
            self._failed(Failure.of(problem, member.number, host=member.host, pid=member.pid))
            return
        if last:
            del self._storing[name]
        self._observer.store(name, message.blob, last)

    def _on_gather(self, member: Member, message: Message) -> None:
        number = int(message["number"])
        meeting = self._rendezvous.setdefault(number, Rendezvous(number, self.size))
        meeting.add(member.number, message)
        if meeting.problem is None:
            meeting.problem = meeting.left_by([m.number for m in self.members.values() if m.finished])
        if meeting.problem is not None or meeting.full:
            blob, fields = meeting.outcome()
            for m in self.members.values():
                if m.number in meeting.values:
                    self._send(m.link, "gathered", blob, **fields)
            if meeting.full:
                del self._rendezvous[number]

    def _on_finished(self, member: Member, message: Message) -> None:
        member.finished = True
        self._observer.event("rank_ended", rank=member.number)
        for meeting in list(self._rendezvous.values()):
            meeting.problem = meeting.problem or meeting.left_by([member.number])
            if meeting.problem is not None:
                blob, fields = meeting.outcome()
                for m in self.members.values():
                    if m.number in meeting.values:
                        self._send(m.link, "gathered", blob, **fields)
        if all(m.finished for m in self.members.values()) and self.formed:
            self.finished = True
            self._broadcast("finished")
            self._notify()

    def _on_failed(self, member: Member, message: Message) -> None:
        fields = {**message.fields, "rank": member.partition if member.rank is None else member.rank}
        failure = Failure.read(fields, message.blob)
        if failure.is_echo and self.size > 1:
            self._after(ECHO_SECONDS, lambda: self._failed(failure))
        else:
            self._failed(failure)

    def _failed(self, failure: Failure) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        self._observer.event("failed", **failure.fields())
        self._broadcast("end", failure.pickled, reason=failure.headline(), failure=failure.fields())
        self._notify()


def received(receipts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Rows per rank of every name, and the fingerprints of the ranks added up to that of the whole exchange."""
    rows: dict[str, list[int]] = {}
    prints: dict[str, dict[int, tuple[int, int]]] = {}
    for _, receipt in sorted(receipts.items()):
        for name, count in receipt["rows"].items():
            rows.setdefault(name, []).append(count)
        for name, parts in receipt["fingerprint"].items():
            for partition, count, digest in parts:
                n, h = prints.setdefault(name, {}).get(partition, (0, 0))
                prints[name][partition] = (n + count, (h + digest) % (1 << 64))
    fingerprint = {name: [[p, n, f"{h:016x}"] for p, (n, h) in sorted(v.items())] for name, v in prints.items()}
    return {"rows": rows, "fingerprint": fingerprint}
