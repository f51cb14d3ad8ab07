"""Sessions over connections that have proved themselves, served by one thread (driver, or the first supervisor)."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tritium.errors import WireError
from tritium.gang.control.address import listener
from tritium.gang.control.session import BEAT, LOST, SILENCE, TICK, Inbox, Outbox
from tritium.wire import MAX_BLOB, Challenge, Codec, Message, Packed

HANDSHAKE_SECONDS = 10.0
CROWD = 128  # with more connections beats are fewer, but still two before an end would be taken for silent
STRANGERS = 256  # connections that have not yet proved themselves, at most
OUTBOX_BYTES = 2 * MAX_BLOB  # what a supervisor has not confirmed, at most
OVER = "this run has ended, or goes on without this supervisor"

Owner = TypeVar("Owner")


class Session(Generic[Owner]):
    """What a supervisor and this server have to say to each other. `owner` is whom its user found at the other end."""

    def __init__(self, server: Server[Owner], name: str, who: str) -> None:
        self.owner: Owner | None = None
        self.id = name
        self.who = who
        self.link: Link[Owner] | None = None
        self.over: str | None = None  # why
        self.away = 0.0  # seconds without a connection
        self.inbox = Inbox()
        self.outbox = Outbox()
        self._server = server

    def send(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        """Have a message delivered; nothing when the session is over."""
        if self.over is not None:
            return
        self.outbox.add(Packed.of(Message(kind, fields, blob)))
        if self.outbox.size > OUTBOX_BYTES:
            self._server.give_up(self, f"it has not taken {self.outbox.size:,} bytes that it was sent")
        elif self.link is not None:
            self.link.flush()


class Link(Generic[Owner]):
    """One connection, from the challenge on; `session` is what it carries, once its other end has said so."""

    def __init__(self, server: Server[Owner], sock: socket.socket, secret: bytes) -> None:
        self.session: Session[Owner] | None = None
        self.open = True
        self.unheard = 0.0  # seconds since the last byte came, counted by a server that listened meanwhile
        self._server = server
        self._socket = sock
        self._challenge: Challenge | None = Challenge(secret)
        self._packet = b""
        self._in = self._out = Codec(None, b"")
        self._queue: deque[memoryview] = deque([memoryview(self._challenge.greeting)])
        self._lock = threading.Lock()  # of what leaves: the pulse sends, too
        self._sent = time.monotonic()
        self._last = False

    @property
    def is_stranger(self) -> bool:
        """Whether the other end has yet to prove that it knows the secret."""
        return self._challenge is not None

    def say(self, kind: str, **fields: Any) -> None:
        """Queue a message of the connection itself, before those of its session."""
        with self._lock:
            self._encode(Packed.of(Message(kind, fields)))
        self.flush()

    def beat(self) -> None:
        """Say what has been received."""
        if self.session is not None:
            self.say("beat", received=self.session.inbox.say(), unheard=self.unheard)

    def end(self) -> None:
        """Close once everything that is queued has left."""
        self._last = True
        self.flush()

    def receive(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`. Raises WireError for what is no message, or no friend."""
        self.unheard = 0.0
        if self._challenge is not None:
            self._packet += data
            if len(self._packet) < Challenge.size:
                return []
            reply, key = self._challenge.answer(self._packet[: Challenge.size])
            data, self._packet = self._packet[Challenge.size :], b""
            with self._lock:
                self._challenge = None
                self._in, self._out = Codec(key, b"c"), Codec(key, b"s")
                self._queue.append(memoryview(reply))
            self.flush()
        return list(self._in.feed(data))

    def flush(self) -> None:
        """Send as much as the socket takes; from the server's thread."""
        try:
            with self._lock:
                waiting = self._push(refill=True)
        except OSError:
            self._server.drop(self)
            return
        if self._last and not waiting:
            self._server.drop(self)
        elif self.open:
            self._server.watch(self, self._socket, writing=waiting)

    def pulse(self, seconds: float) -> None:
        """A beat when nothing has been sent for so long; from a thread of its own."""
        with self._lock:
            if self.session is None or not self.open or time.monotonic() - self._sent < seconds:
                return
            if not self._queue:
                fields = {"received": self.session.inbox.received, "unheard": self.unheard}
                self._encode(Packed.of(Message("beat", fields)))
            try:
                self._push(refill=False)
            except OSError:  # the server's thread will see it, too
                return

    def _push(self, *, refill: bool) -> bool:
        """Send as much as the socket takes; whether anything is left. `refill` from the session: its thread only."""
        try:
            while self._queue or (refill and self._refill()):
                sent = self._socket.send(self._queue[0])
                self._sent = time.monotonic()
                if sent == len(self._queue[0]):
                    self._queue.popleft()
                else:
                    self._queue[0] = self._queue[0][sent:]
        except BlockingIOError:
            return True  # the selector says when there is room again
        return False

    def _refill(self) -> bool:
        # Messages become frames only when there is room: a large one for many ranks would hold up all others.
        if self.session is None or not self.session.outbox or self._last:
            return False
        self._encode(self.session.outbox.next())
        return True

    def _encode(self, message: Packed) -> None:
        self._queue.extend(memoryview(part) for part in self._out.encode(message) if part)

    def read(self) -> bytes:
        """What has arrived; empty at the end. BlockingIOError when it was a false alarm."""
        try:
            return self._socket.recv(1 << 18)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def close(self) -> socket.socket:
        """Let go of the socket, which the server closes."""
        with self._lock:
            self.open = False
        return self._socket


class Server(Generic[Owner]):
    """Listens on a free port of `host`, or on a socket that does so already. All callbacks are called from its thread.

    on_message(session, message) : may raise WireError, ValueError, TypeError or KeyError for a message that is none.
    on_broken(session, error)    : what came was no message, or from a stranger (None). The session, if any, is over
                                   afterwards, except when it only came damaged: then it goes on, on a new connection.
    on_connection(session)       : `session.link` is another one, or None: it has no connection at present.
    on_gone(session)             : a session is over, for the reason `session.over`.
    """

    def __init__(
        self,
        host: str | socket.socket,
        secret: bytes,
        *,
        on_message: Callable[[Session[Owner], Message], None],
        on_broken: Callable[[Session[Owner] | None, Exception], None],
        on_connection: Callable[[Session[Owner]], None],
        on_gone: Callable[[Session[Owner]], None],
    ) -> None:
        self._secret = secret
        self._on_message = on_message
        self._on_broken = on_broken
        self._on_connection = on_connection
        self._on_gone = on_gone
        self.links: dict[socket.socket, Link[Owner]] = {}
        self.sessions: dict[str, Session[Owner]] = {}  # all there ever were, so that none comes back
        self.patience = LOST
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._listener = host if isinstance(host, socket.socket) else listener(host)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._running = True
        self._stopped = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="tritium-pulse", daemon=True)

    def call(self, call: Callable[[], None]) -> None:
        """Have the server's thread call this; from any thread."""
        self._calls.append(call)
        try:
            self._waker.send(b"!")
        except OSError:  # already closed: there is no one left to tell
            return

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call this later; from the server's thread."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._ticket), call))

    def serve(self) -> None:
        """Serve until `stop`."""
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._pulse.start()
        self._tick()
        while self._running:
            wait = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, events in self._selector.select(wait):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                else:
                    self._attend(key.data, events)
            while self._calls:
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def stop(self) -> None:
        """Return from `serve`; what is queued still leaves, as far as the sockets take it. From the server's thread."""
        self._running = False

    def release(self) -> None:
        """Say that this is the end, and close every socket."""
        self._stopped.set()
        if self._pulse.ident is not None:
            self._pulse.join()
        self.patience = float("inf")
        for link in list(self.links.values()):
            link.flush()
            if link.open and not link.is_stranger:
                link.say("over", reason=OVER)
        for sock in (*self.links, self._listener, self._woken, self._waker):
            sock.close()
        self.links.clear()
        self._selector.close()

    # ---- time

    def _tick(self) -> None:
        """Count the silence of every connection, and the absence of every session that has none.

        What is counted are ticks of a thread that listened: neither a long callback nor a process that was stopped
        for a while makes others silent.
        """
        for link in list(self.links.values()):
            link.unheard += TICK
            if link.unheard > SILENCE and not link.is_stranger:
                self.drop(link)
        for session in list(self.sessions.values()):
            if session.over is None and session.link is None:
                session.away += TICK
                if session.away > self.patience:
                    self.give_up(session, f"nothing was heard of it for {session.away:g} s")
        self.after(TICK, self._tick)

    def _beat(self) -> None:
        """The pulse: a callback that takes long must not make this server look dead."""
        while not self._stopped.wait(TICK):
            links = list(self.links.values())
            seconds = BEAT if len(links) <= CROWD else SILENCE / 2 - TICK
            for link in links:
                link.pulse(seconds)

    def lose_patience(self) -> None:
        """No one who is away will come back: those who are, and those who will be, are gone at once."""
        self.patience = 0.0
        for session in list(self.sessions.values()):
            if session.over is None and session.link is None:
                self.give_up(session, "its connection broke")

    # ---- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the client was gone again, or this process is out of file descriptors
            return
        strangers = [link for link in self.links.values() if link.is_stranger]
        if len(strangers) >= STRANGERS:  # the oldest goes: one of ours would have proved itself by now
            self.drop(strangers[0])
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link: Link[Owner] = Link(self, sock, self._secret)
        self.links[sock] = link
        self._selector.register(sock, selectors.EVENT_READ, link)
        link.flush()
        self.after(HANDSHAKE_SECONDS, lambda: self.drop(link) if link.is_stranger else None)

    def _attend(self, link: Link[Owner], events: int) -> None:
        if events & selectors.EVENT_WRITE:
            link.flush()
        if not events & selectors.EVENT_READ or not link.open:
            return
        try:
            data = link.read()
        except BlockingIOError:
            return
        if not data:
            self.drop(link)
            return
        try:
            messages = link.receive(data)
        except WireError as error:  # a stranger, or damaged on its way: a session goes on with the next connection
            self._on_broken(None, error)
            self.drop(link)
            return
        for message in messages:
            if not self._take(link, message):
                return
        if link.open and link.session is not None and link.session.inbox.due:
            link.beat()

    def _take(self, link: Link[Owner], message: Message) -> bool:
        """One message; whether those after it still count. All of them do when only the connection is gone."""
        session = link.session
        if session is not None and session.over is not None:
            return False
        try:
            if session is None:
                self._join(link, message)
            elif message.kind == "beat":
                session.outbox.confirm(int(message["received"]))
            else:
                session.inbox.count(len(message.blob))
                if message.kind == "bye":
                    link.beat()
                    self.give_up(session, "it has said goodbye")
                else:
                    self._on_message(session, message)
        except (WireError, ValueError, TypeError, KeyError) as error:
            self._on_broken(session, error)
            if session is not None:
                self.give_up(session, str(error))
            self.drop(link)
        return link.session is not None and link.session.over is None

    def _join(self, link: Link[Owner], message: Message) -> None:
        """The first message of a connection says which session goes on with it."""
        if message.kind != "session":
            raise WireError(f"A {message.kind!r} message came before its sender said which session it belongs to.")
        name, first, received = str(message["id"]), int(message["first"]), int(message["received"])
        session = self.sessions.get(name)
        if session is None and not first and not received:
            session = self.sessions[name] = Session(self, name, str(message["who"]))
        if session is None or session.over is not None:
            reason = OVER if session is None else str(session.over)
            self._on_broken(None, WireError(f"{message['who']} came back, but {reason}."))
            self._dismiss(link, reason)
            return
        session.outbox.again(received)
        if session.link is not None:
            old, session.link = session.link, None
            self.drop(old)
        session.link, session.away = link, 0.0
        link.say("session", received=session.inbox.say())
        link.session = session
        link.flush()
        self._on_connection(session)

    def give_up(self, session: Session[Owner], reason: str) -> None:
        """This session is over, and does not come back."""
        if session.over is not None:
            return
        session.over = reason
        session.outbox = Outbox()
        link, session.link = session.link, None
        if link is not None:
            self._dismiss(link, reason)
        self._on_gone(session)

    def _dismiss(self, link: Link[Owner], reason: str) -> None:
        """Tell the other end that it is not wanted, and close once that has left, or can't leave."""
        link.say("over", reason=reason)
        link.end()
        self.after(HANDSHAKE_SECONDS, lambda: self.drop(link))

    def watch(self, link: Link[Owner], sock: socket.socket, *, writing: bool) -> None:
        """Whether to be told when there is room to write."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        if self._selector.get_key(sock).events != wanted:
            self._selector.modify(sock, wanted, link)

    def drop(self, link: Link[Owner]) -> None:
        """Close a connection at once. Its session waits for another, as long as there is patience."""
        if not link.open:
            return
        sock = link.close()
        del self.links[sock]
        self._selector.unregister(sock)
        sock.close()
        session = link.session
        if session is not None and session.link is link:
            session.link, session.away = None, link.unheard
            self._on_connection(session)
            if not self.patience:
                self.give_up(session, "its connection broke")
