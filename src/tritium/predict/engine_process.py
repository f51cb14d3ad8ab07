"""Call the models of a device for all Python workers of an executor (engine process).

One thread does so: frameworks share more than a model among their threads. The process ends when it has had no
connection for a while, or when the executor's Python daemon has ended.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import socket
import threading
from contextlib import ExitStack, closing, suppress
from typing import Any

from tritium import ship
from tritium.model.engine import Engine
from tritium.model.files import mapped
from tritium.predict import kept
from tritium.predict.array_channel import BROKEN, ArrayChannel, Raised
from tritium.predict.device_engine import WELCOME_BYTES
from tritium.wire import peer

IDLE_SECONDS = 60.0
"""How long the process waits for a task, as Spark does before it ends an idle Python worker."""
_ABANDONED_SECONDS = 60
"""How long a call may go on after its caller has ended, while others wait."""


def main(argument: str) -> None:
    """Serve, and end the process. `argument`: JSON of the `listener`, the `daemon`, and the workers' import `path`."""
    order = json.loads(argument)
    ship.import_from(order["path"])
    server = _DeviceServer(socket.socket(fileno=order["listener"]))
    threading.Thread(target=server.watch, args=(order["daemon"],), daemon=True).start()
    server.serve()
    os._exit(0)  # Threads of a model may live on.


class _Client:
    """A task's connection, and the model that it calls."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._channel: ArrayChannel | None = None
        self._engine: Engine | None = None
        self._resources = ExitStack()

    def answer(self) -> None:
        """Answer the next message. Raises one of BROKEN where the task has ended."""
        if self._channel is None:
            self._channel, weights = ArrayChannel.accepted(self.connection)
            self._resources.enter_context(closing(self._channel))
            self._resources.callback(os.close, weights)
            self._weights = weights
        message = self._channel.receive()
        answer: Any = None
        try:
            if self._engine is None:
                self._restore(*message)
            else:
                answer = self._engine.call(*message)
        except BaseException as error:  # noqa: BLE001 - the task raises it, a SystemExit too
            answer = Raised.of(error)
        self._channel.send(answer)

    def _restore(self, plan: dict[str, Any], cpus: int, gpus: list[str]) -> None:
        weights = f"/proc/self/fd/{self._weights}"
        self._engine = self._resources.enter_context(kept.ready(plan, lambda: mapped(weights), cpus=cpus, gpus=gpus))

    def is_gone(self) -> bool:
        """Whether the task has ended."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._resources.close()
        self.connection.close()


class _DeviceServer:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._calling: _Client | None = None

    def serve(self) -> None:
        """Answer clients until there has been none for IDLE_SECONDS, or none is left and no model could be restored."""
        clients, idle = 0, IDLE_SECONDS
        while ready := self._selector.select(None if clients else idle):
            for key, _ in ready:
                if key.data is None:
                    clients += self._accept()
                    continue
                self._calling = key.data
                try:
                    key.data.answer()
                except BROKEN:
                    self._selector.unregister(key.fileobj)
                    key.data.close()
                    clients -= 1
                    idle = IDLE_SECONDS if kept.are_there() else 0
                self._calling = None

    def _accept(self) -> int:
        """Welcome a task. Returns the number of clients that this adds."""
        connection, _ = self._listener.accept()
        if peer(connection)[1] != os.getuid():  # The socket's name has no owner and no mode.
            connection.close()
            return 0
        with suppress(OSError):  # If the task has ended, its first message tells so.
            connection.sendall(os.getpid().to_bytes(WELCOME_BYTES, "big"))
        self._selector.register(connection, selectors.EVENT_READ, _Client(connection))
        return 1

    def watch(self, daemon: int) -> None:
        """End this process when Spark's Python daemon has ended, or when a call goes on for nobody."""
        poll, abandoned = select.poll(), 0
        with suppress(OSError, AttributeError):  # Not every system can tell; then it ends by being idle.
            poll.register(os.pidfd_open(daemon), select.POLLIN)
        while abandoned < _ABANDONED_SECONDS and not poll.poll(1000):
            client = self._calling
            abandoned = abandoned + 1 if client is not None and client.is_gone() else 0
        os._exit(1)
