"""A server of control connections that keeps the messages it receives, and answers as told; and its clients."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from tritium.gang.control.client import Client
from tritium.gang.control.connection import ControlSession
from tritium.gang.control.server import Server
from tritium.tls import Certificate
from tritium.wire import Message

SECONDS = 10.0
SECRET = b"secret"


class Serving:
    """The server, in a thread of its own. `certificate` is that of its connections; None: they are in the clear."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        self.certificate = certificate
        self.changed = threading.Condition()
        self.heard: list[Message] = []
        self.broken: list[str] = []
        self.gone: list[str] = []
        self.connections = 0
        self.slow = 0.0
        self.server: Server[Any] = Server(
            "127.0.0.1",
            SECRET,
            on_message=self._message,
            on_broken=lambda session, error: self.broken.append(str(error)),
            on_connection=self._connection,
            on_gone=self._gone,
            certificate=certificate,
        )
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.server.serve()
        self.server.release()

    def _message(self, session: ControlSession[Any], message: Message) -> None:
        if message.kind == "sleep":
            time.sleep(message["seconds"])
        if message.kind == "gather":
            for other in self.server.sessions.values():
                other.send("gathered", message.blob)
        if message.kind == "echo":
            session.send("echoed", message.blob, **message.fields)
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()

    def _connection(self, session: ControlSession[Any]) -> None:
        self.connections += session.connection is not None

    def _gone(self, session: ControlSession[Any]) -> None:
        with self.changed:
            self.gone.append(str(session.closed))
            self.changed.notify_all()

    def until(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.heard) >= count, SECONDS), len(self.heard)

    def until_goodbye(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.gone, SECONDS)
        assert self.gone == ["it has ended its connection"]

    def close(self) -> None:
        self.server.call(self.server.stop)
        self._thread.join()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def client(self, address: tuple[str, int] | None = None) -> Client:
        """Connect to the server, or to a proxy before it at `address`."""
        return Client(address or self.server.address, SECRET, "a test", SECONDS, certificate=self.certificate)

    @contextlib.contextmanager
    def line(self, address: tuple[str, int] | None = None) -> Iterator[Client]:
        """Yield a client, and close it."""
        made = self.client(address)
        try:
            yield made
        finally:
            made.close()
