"""A TCP proxy that simulates network faults (delays, resets, refused connections, silence) and records traffic."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.driver import attempt

REST = 1.0  # seconds


class Proxy:
    """A proxy for any number of clients of `target`, in its own thread. Its methods may be called from any thread.

    sent     : for each connection, in order, the bytes that its client sent.
    answered : those that the target sent it.
    """

    def __init__(self, target: tuple[str, int], *, delay: float = 0.0) -> None:
        self.target = target
        self.delay = delay
        self.cuts = 0
        self.sent: list[bytearray] = []
        self.answered: list[bytearray] = []
        self._refusing = False
        self._pairs: set[Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self.address: tuple[str, int] = self._do(self._open())

    # ---- for tests

    def cut(self) -> None:
        """Reset every connection; new ones are let through."""
        self._do(self._cut())

    def refuse(self, refusing: bool = True) -> None:
        """Reset every connection, new ones too, until `refuse(False)`."""
        self._refusing = refusing
        if refusing:
            self.cut()

    def freeze(self, frozen: bool = True, *, there: bool = True, back: bool = True) -> None:
        """Forward nothing to the target (`there`) or from it (`back`), and close nothing, until `freeze(False)`."""
        self._do(self._freeze(frozen, there, back))

    def inject(self, data: bytes) -> None:
        """Send `data` to the target over every connection, as if its client had."""
        self._do(self._inject(data))

    @contextlib.contextmanager
    def cutting(self, chance: random.Random, least: float, most: float) -> Iterator[None]:
        """Cut repeatedly in this block, after `least` to `most` seconds; every 20th time after REST seconds more.

        A busy machine may need longer than `most` to connect, and a peer without a connection is lost after seconds.
        """
        over = threading.Event()

        def run() -> None:
            while not over.wait(chance.uniform(least, most) + (REST if self.cuts % 20 == 19 else 0.0)):
                self.cut()
                self.cuts += 1

        thread = threading.Thread(target=run, name="cutting")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Reset every connection, and stop."""
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- in the proxy's thread

    def _do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(20)

    async def _open(self) -> tuple[str, int]:
        self._there, self._back = asyncio.Event(), asyncio.Event()
        self._there.set()
        self._back.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            out_reader, out_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        if self._refusing:
            writer.transport.abort()
            out_writer.transport.abort()
            return
        sent, answered = bytearray(), bytearray()
        self.sent.append(sent)
        self.answered.append(answered)
        pair = Pair(writer, out_writer)
        self._pairs.add(pair)
        self._spawn(self._pump(pair, reader, out_writer, self._there, sent.extend))
        self._spawn(self._pump(pair, out_reader, writer, self._back, answered.extend))

    def _spawn(self, what: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        pair: Pair,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        flowing: asyncio.Event,
        note: Callable[[bytes], Any],
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        forward = self._loop.create_task(self._forward(queue, writer, flowing))
        try:
            data = b"x"
            while data:
                data = await reader.read(1 << 16)
                note(data)
                await queue.put((self._loop.time() + self.delay, data))
            await forward
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            forward.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await forward
            pair.abort()
            self._pairs.discard(pair)

    async def _forward(
        self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, flowing: asyncio.Event
    ) -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await flowing.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()

    async def _cut(self) -> None:
        for pair in list(self._pairs):
            pair.abort()

    async def _freeze(self, frozen: bool, there: bool, back: bool) -> None:
        for flowing in [self._there] * there + [self._back] * back:
            flowing.clear() if frozen else flowing.set()

    async def _inject(self, data: bytes) -> None:
        for pair in list(self._pairs):
            pair.server.write(data)

    async def _close(self) -> None:
        self._server.close()
        self._there.set()
        self._back.set()
        await self._cut()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):  # aborted transports call back in the loop's next rounds
            await asyncio.sleep(0)


class Pair:
    """The two ends of one connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server

    def abort(self) -> None:
        """Reset both ends."""
        self.client.transport.abort()
        self.server.transport.abort()


@contextlib.contextmanager
def before_coordinators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proxy]]:
    """Put every coordinator that a launch makes in this block behind a proxy, which is in the list yielded."""
    proxies: list[Proxy] = []

    class Behind(Coordinator):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            proxies.append(Proxy(self.address))
            self.address = proxies[-1].address

    monkeypatch.setattr(attempt, "Coordinator", Behind)
    yield proxies
    for proxy in proxies:
        proxy.close()
