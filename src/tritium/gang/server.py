"""Connections that have proved themselves, served by one thread and a selector (driver, or the first supervisor)."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tritium.errors import WireError
from tritium.wire import Challenge, Codec, Message

HANDSHAKE_SECONDS = 10.0
STRANGERS = 256  # connections that have not yet proved themselves, at most

Owner = TypeVar("Owner")


class Link(Generic[Owner]):
    """One connection, from the challenge on. `owner` is whom its user found at the other end."""

    def __init__(self, server: Server[Owner], sock: socket.socket, secret: bytes) -> None:
        self.owner: Owner | None = None
        self.open = True
        self._server = server
        self._socket = sock
        self._challenge: Challenge | None = Challenge(secret)
        self._packet = b""
        self._in = self._out = Codec(None, b"")
        self._queue: deque[memoryview] = deque([memoryview(self._challenge.greeting)])
        self._last = False

    @property
    def is_stranger(self) -> bool:
        """Whether the other end has yet to prove that it knows the secret."""
        return self._challenge is not None

    def send(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        """Queue a message; nothing when the connection is gone."""
        if self.open:
            self._queue.extend(memoryview(part) for part in self._out.encode(Message(kind, fields, blob)) if part)
            self.flush()

    def end(self) -> None:
        """Close once everything that is queued has left."""
        self._last = True
        self.flush()

    def receive(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`. Raises WireError for what is no message, or no friend."""
        if self._challenge is not None:
            self._packet += data
            if len(self._packet) < Challenge.size:
                return []
            reply, key = self._challenge.answer(self._packet[: Challenge.size])
            data, self._packet = self._packet[Challenge.size :], b""
            self._challenge = None
            self._in, self._out = Codec(key, b"c"), Codec(key, b"s")
            self._queue.append(memoryview(reply))
            self.flush()
        return list(self._in.feed(data))

    def flush(self) -> None:
        """Send as much as the socket takes."""
        try:
            while self._queue:
                sent = self._socket.send(self._queue[0])
                if sent == len(self._queue[0]):
                    self._queue.popleft()
                else:
                    self._queue[0] = self._queue[0][sent:]
        except BlockingIOError:
            pass  # the selector says when there is room again
        except OSError:
            self._server.drop(self)
            return
        if self._last and not self._queue:
            self._server.drop(self)
        elif self.open:
            self._server.watch(self, self._socket, writing=bool(self._queue))

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
        self.open = False
        return self._socket


class Server(Generic[Owner]):
    """Listens on a free port of `host`. All three callbacks are called from its thread.

    on_message(link, message) : may raise WireError, ValueError, TypeError or KeyError for a message that is none.
    on_broken(link, error)    : what came over this link was no message; the link is dropped afterwards.
    on_gone(link)             : a link was dropped.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        *,
        on_message: Callable[[Link[Owner], Message], None],
        on_broken: Callable[[Link[Owner], Exception], None],
        on_gone: Callable[[Link[Owner]], None],
    ) -> None:
        self._secret = secret
        self._on_message = on_message
        self._on_broken = on_broken
        self._on_gone = on_gone
        self.links: dict[socket.socket, Link[Owner]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._running = True

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
        for link in list(self.links.values()):
            link.flush()

    def release(self) -> None:
        """Close every socket."""
        for sock in (*self.links, self._listener, self._woken, self._waker):
            sock.close()
        self.links.clear()
        self._selector.close()

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
            for message in link.receive(data):
                self._on_message(link, message)
        except (WireError, ValueError, TypeError, KeyError) as error:
            self._on_broken(link, error)
            self.drop(link)

    def watch(self, link: Link[Owner], sock: socket.socket, *, writing: bool) -> None:
        """Whether to be told when there is room to write."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        if self._selector.get_key(sock).events != wanted:
            self._selector.modify(sock, wanted, link)

    def drop(self, link: Link[Owner]) -> None:
        """Close a connection at once."""
        if link.open:
            sock = link.close()
            del self.links[sock]
            self._selector.unregister(sock)
            sock.close()
            self._on_gone(link)
