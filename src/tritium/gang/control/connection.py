"""The server's side of a connection, and of its session, which outlives it (driver, or the first supervisor)."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tritium.gang.control.session import Inbox, Outbox
from tritium.wire import MAX_BLOB, PIECE, Challenge, Codec, Message, Packed

if TYPE_CHECKING:
    from tritium.tls import Tls

OUTBOX_BYTES = 2 * MAX_BLOB
"""A supervisor with more unconfirmed bytes is given up."""

Owner = TypeVar("Owner")


class Serving(Protocol[Owner]):
    """The part of the server that connections need."""

    def give_up(self, session: ControlSession[Owner], reason: str) -> None: ...
    def watch(self, connection: Connection[Owner], sock: socket.socket, *, writing: bool) -> None: ...
    def drop(self, connection: Connection[Owner]) -> None: ...


class ControlSession(Generic[Owner]):
    """The messages between one supervisor and the server.

    owner : a Member, which the server's user sets.
    """

    def __init__(self, server: Serving[Owner], name: str, who: str) -> None:
        self.owner: Owner | None = None
        self.id = name
        self.who = who
        self.connection: Connection[Owner] | None = None
        self.closed: str | None = None
        """The reason why the session was closed; None while it is open."""
        self.away = 0.0
        """Seconds without a connection."""
        self.inbox = Inbox()
        self.outbox = Outbox()
        self._server = server

    def send(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        """Send a message; does nothing when the session is closed."""
        if self.closed is not None:
            return
        self.outbox.add(Packed.of(Message(kind, fields, blob)))
        if self.outbox.size > OUTBOX_BYTES:
            self._server.give_up(self, f"it has not taken {self.outbox.size:,} bytes that it was sent")
        elif self.connection is not None:
            self.connection.flush()


class Connection(Generic[Owner]):
    """One connection, from its challenge on; `session` is set when the peer has named it.

    tls : encrypts it, from the first byte on; None: nothing does.
    """

    def __init__(self, server: Serving[Owner], sock: socket.socket, secret: bytes, tls: Tls | None = None) -> None:
        self.session: ControlSession[Owner] | None = None
        self.open = True
        self.unheard = 0.0
        """Seconds since the last byte, counted only while the server ran."""
        self._server = server
        self._socket = sock
        self._tls = tls
        self._challenge: Challenge | None = Challenge(secret)
        self._packet = b""
        self._in = self._out = Codec(None, b"")
        self._queue: deque[memoryview] = deque([memoryview(self._challenge.greeting)])
        self._leaving = memoryview(b"")
        """The bytes that the socket gets next: of the queue, encrypted where there is TLS."""
        self._lock = threading.Lock()  # For the sending side, as the heartbeat thread sends, too.
        self._sent = time.monotonic()
        self._last = False

    @property
    def is_unauthenticated(self) -> bool:
        """Whether the peer has yet to be authenticated."""
        return self._challenge is not None

    def send_at_once(self, kind: str, **fields: Any) -> None:
        """Queue a message of the connection, before those of its session."""
        with self._lock:
            self._encode(Packed.of(Message(kind, fields)))
        self.flush()

    def send_heartbeat(self) -> None:
        """Send a heartbeat with the number of messages received."""
        if self.session is not None:
            self.send_at_once("heartbeat", received=self.session.inbox.acknowledge(), unheard=self.unheard)

    def end(self) -> None:
        """Close when everything that is queued has been sent."""
        self._last = True
        self.flush()

    def receive(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes. Raises WireError for a malformed message or a failed challenge."""
        self.unheard = 0.0
        content = data if self._tls is None else self._tls.opened(data)
        if self._tls is not None and self._challenge is not None:
            self.flush()  # The answer of TLS's own handshake, or the greeting when that is complete.
        if self._challenge is not None:
            self._packet += bytes(content)
            if len(self._packet) < Challenge.size:
                return []
            reply, key = self._challenge.answer(self._packet[: Challenge.size])
            content, self._packet = self._packet[Challenge.size :], b""
            with self._lock:
                self._challenge = None
                if self._tls is None:  # It authenticates every byte itself.
                    self._in, self._out = Codec(key, b"c"), Codec(key, b"s")
                self._queue.append(memoryview(reply))
            self.flush()
        return list(self._in.feed(content))

    def flush(self) -> None:
        """Send as much as the socket takes. Called from the server's thread."""
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

    def keep_alive(self, seconds: float) -> None:
        """Send a heartbeat if nothing was sent for `seconds`. Called from the heartbeat thread."""
        with self._lock:
            if self.session is None or not self.open or time.monotonic() - self._sent < seconds:
                return
            if not self._leaving and not self._queue:
                fields = {"received": self.session.inbox.received, "unheard": self.unheard}
                self._encode(Packed.of(Message("heartbeat", fields)))
            try:
                self._push(refill=False)
            except OSError:  # The server's thread gets the same error, and closes the connection.
                return

    def _push(self, *, refill: bool) -> bool:
        """Send as much as the socket takes; tell whether anything is left.

        refill : whether to take messages from the session, too, which only the server's thread may do.
        """
        try:
            while self._load(refill):
                sent = self._socket.send(self._leaving)
                self._sent = time.monotonic()
                self._leaving = self._leaving[sent:]
        except BlockingIOError:
            return True  # The selector calls when there is room again.
        return False

    def _load(self, refill: bool) -> bool:
        """Take the next bytes for the socket, if it has got the last ones; tell whether there are any."""
        if self._leaving:
            return True
        if self._tls is None or self._tls.ready:
            if not self._queue and not (refill and self._refill()):
                return False
            self._leaving = self._queue.popleft()
        if self._tls is not None:  # Encrypted here, as all connections share the blob of a gather.
            if len(self._leaving) > PIECE:
                self._queue.appendleft(self._leaving[PIECE:])
            self._leaving = memoryview(self._tls.sealed(self._leaving[:PIECE]))
        return bool(self._leaving)

    def _refill(self) -> bool:
        # A message is encoded only when there is room, as a large one for many ranks would delay all others.
        if self.session is None or not self.session.outbox or self._last:
            return False
        self._encode(self.session.outbox.next())
        return True

    def _encode(self, message: Packed) -> None:
        self._queue.extend(memoryview(part) for part in self._out.encode(message) if part)

    def read(self) -> bytes:
        """Return the bytes that have arrived; empty at the end. Raises BlockingIOError when there are none."""
        try:
            return self._socket.recv(PIECE)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def close(self) -> socket.socket:
        """Mark the connection closed, and return its socket for the server to close."""
        with self._lock:
            self.open = False
        return self._socket
