"""Serve sessions over authenticated connections, in one thread (driver, or the first supervisor)."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic

from tritium.errors import WireError
from tritium.gang.control.address import listener
from tritium.gang.control.connection import Connection, ControlSession, Owner
from tritium.gang.control.session import HEARTBEAT_SECONDS, LOST, SILENCE, TICK, Outbox
from tritium.wire import Message

if TYPE_CHECKING:
    from tritium.tls import Certificate

HANDSHAKE_SECONDS = 10.0
CROWD = 128
"""With more connections heartbeats are rarer, but still two within SILENCE."""
MAX_UNAUTHENTICATED = 256
"""The most unauthenticated connections."""
RUN_ENDED = "this run has ended, or continues without this supervisor"


class Server(Generic[Owner]):
    """Listens on a free port of `host`, or on a socket that does so already. All callbacks are called from its thread.

    on_message(session, message) : may raise WireError, ValueError, TypeError or KeyError for a malformed message.
    on_broken(session, error)    : a malformed or refused message. `session` is None for an unauthenticated peer and for
                                   a damaged frame, after which a session may continue on a new connection; otherwise
                                   the session is ended.
    on_connection(session)       : `session.connection` has changed; None: it has no connection at present.
    on_gone(session)             : a session was closed, for the reason `session.closed`.
    certificate                  : that by which connections are encrypted; None: they are not.
    """

    def __init__(
        self,
        host: str | socket.socket,
        secret: bytes,
        *,
        on_message: Callable[[ControlSession[Owner], Message], None],
        on_broken: Callable[[ControlSession[Owner] | None, Exception], None],
        on_connection: Callable[[ControlSession[Owner]], None],
        on_gone: Callable[[ControlSession[Owner]], None],
        certificate: Certificate | None = None,
    ) -> None:
        self._secret = secret if certificate is None else certificate.bound(secret)
        self._accept_tls = None if certificate is None else certificate.acceptor()
        self._on_message = on_message
        self._on_broken = on_broken
        self._on_connection = on_connection
        self._on_gone = on_gone
        self.connections: dict[socket.socket, Connection[Owner]] = {}
        self.sessions: dict[str, ControlSession[Owner]] = {}  # Ended ones are kept, so that none is taken up again.
        self.away_limit = LOST
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
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="tritium-heartbeats", daemon=True)

    def call(self, call: Callable[[], None]) -> None:
        """Have the server's thread call `call`. May be called from any thread."""
        self._calls.append(call)
        try:
            self._waker.send(b"!")
        except OSError:  # It is closed, as the thread has ended.
            return

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have `call` called after `seconds`. Must be called from the server's thread."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._ticket), call))

    def serve(self) -> None:
        """Serve until `stop` is called."""
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._heartbeats.start()
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
        """Let `serve` return. Must be called from the server's thread; `release` then sends what is queued."""
        self._running = False

    def release(self) -> None:
        """Tell every peer that the run has ended, and close every socket."""
        self._stopped.set()
        if self._heartbeats.ident is not None:
            self._heartbeats.join()
        self.away_limit = float("inf")
        for connection in list(self.connections.values()):
            connection.flush()
            if connection.open and not connection.is_unauthenticated:
                connection.send_at_once("closed", reason=RUN_ENDED)
        for sock in (*self.connections, self._listener, self._woken, self._waker):
            sock.close()
        self.connections.clear()
        self._selector.close()

    # ---- Time

    def _tick(self) -> None:
        """Drop connections silent for SILENCE, and give up sessions without a connection for `away_limit` seconds.

        Time is counted in ticks of this thread, so a long callback, or a stop of this process, does not make peers
        look silent.
        """
        for connection in list(self.connections.values()):
            connection.unheard += TICK
            if connection.unheard > SILENCE and not connection.is_unauthenticated:
                self.drop(connection)
        for session in list(self.sessions.values()):
            if session.closed is None and session.connection is None:
                session.away += TICK
                if session.away > self.away_limit:
                    self.give_up(session, f"nothing was heard of it for {session.away:g} s")
        self.after(TICK, self._tick)

    def _send_heartbeats(self) -> None:
        """Send heartbeats, in a thread of its own: a long callback must not make this server look dead."""
        while not self._stopped.wait(TICK):
            connections = list(self.connections.values())
            seconds = HEARTBEAT_SECONDS if len(connections) <= CROWD else SILENCE / 2 - TICK
            for connection in connections:
                connection.keep_alive(seconds)

    def refuse_reconnects(self) -> None:
        """From now on, give up every session as soon as it has no connection."""
        self.away_limit = 0.0
        for session in list(self.sessions.values()):
            if session.closed is None and session.connection is None:
                self.give_up(session, "its connection broke")

    # ---- Connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # The client has disconnected, or this process is out of file descriptors.
            return
        unauthenticated = [connection for connection in self.connections.values() if connection.is_unauthenticated]
        if len(unauthenticated) >= MAX_UNAUTHENTICATED:  # The oldest goes, as a supervisor would be authenticated.
            self.drop(unauthenticated[0])
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection: Connection[Owner] = Connection(self, sock, self._secret, self._accept_tls and self._accept_tls())
        self.connections[sock] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        connection.flush()
        self.after(HANDSHAKE_SECONDS, lambda: self.drop(connection) if connection.is_unauthenticated else None)

    def _attend(self, connection: Connection[Owner], events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if not events & selectors.EVENT_READ or not connection.open:
            return
        try:
            data = connection.read()
        except BlockingIOError:
            return
        if not data:
            self.drop(connection)
            return
        try:
            messages = connection.receive(data)
        except WireError as error:  # Not authentic, or damaged. A session continues on the next connection.
            self._on_broken(None, error)
            self.drop(connection)
            return
        for message in messages:
            if not self._take(connection, message):
                return
        if connection.open and connection.session is not None and connection.session.inbox.due:
            connection.send_heartbeat()

    def _take(self, connection: Connection[Owner], message: Message) -> bool:
        """Handle one message; tell whether to handle those after it (yes while the session lasts)."""
        session = connection.session
        if session is not None and session.closed is not None:
            return False
        try:
            if session is None:
                self._join(connection, message)
            elif message.kind == "heartbeat":
                session.outbox.confirm(int(message["received"]))
            else:
                session.inbox.count(len(message.blob))
                if message.kind == "bye":
                    connection.send_heartbeat()
                    self.give_up(session, "it has ended its connection")
                else:
                    self._on_message(session, message)
        except (WireError, ValueError, TypeError, KeyError) as error:
            self._on_broken(session, error)
            if session is not None:
                self.give_up(session, str(error))
            self.drop(connection)
        return connection.session is not None and connection.session.closed is None

    def _join(self, connection: Connection[Owner], message: Message) -> None:
        """Attach a connection to the session that its first message names."""
        if message.kind != "session":
            raise WireError(f"A {message.kind!r} message came before its sender said which session it belongs to.")
        name, first, received = str(message["id"]), int(message["first"]), int(message["received"])
        session = self.sessions.get(name)
        if session is None and not first and not received:
            session = self.sessions[name] = ControlSession(self, name, str(message["who"]))
        if session is None or session.closed is not None:
            reason = RUN_ENDED if session is None else str(session.closed)
            self._on_broken(None, WireError(f"{message['who']} came back, but {reason}."))
            self._dismiss(connection, reason)
            return
        session.outbox.resume(received)
        if session.connection is not None:
            old, session.connection = session.connection, None
            self.drop(old)
        session.connection, session.away = connection, 0.0
        connection.send_at_once("session", received=session.inbox.acknowledge())
        connection.session = session
        connection.flush()
        self._on_connection(session)

    def give_up(self, session: ControlSession[Owner], reason: str) -> None:
        """End a session for good."""
        if session.closed is not None:
            return
        session.closed = reason
        session.outbox = Outbox()
        connection, session.connection = session.connection, None
        if connection is not None:
            self._dismiss(connection, reason)
        self._on_gone(session)

    def _dismiss(self, connection: Connection[Owner], reason: str) -> None:
        """Send `closed` with the reason, and close the connection when that is sent, or after HANDSHAKE_SECONDS."""
        connection.send_at_once("closed", reason=reason)
        connection.end()
        self.after(HANDSHAKE_SECONDS, lambda: self.drop(connection))

    def watch(self, connection: Connection[Owner], sock: socket.socket, *, writing: bool) -> None:
        """Set whether the selector reports room to write."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        if self._selector.get_key(sock).events != wanted:
            self._selector.modify(sock, wanted, connection)

    def drop(self, connection: Connection[Owner]) -> None:
        """Close a connection at once. Its session waits `away_limit` seconds for another one."""
        if not connection.open:
            return
        sock = connection.close()
        del self.connections[sock]
        self._selector.unregister(sock)
        sock.close()
        session = connection.session
        if session is not None and session.connection is connection:
            session.connection, session.away = None, connection.unheard
            self._on_connection(session)
            if not self.away_limit:
                self.give_up(session, "its connection broke")
