"""The events of one run on their way to those who listen (driver)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice

from tritium.events import Event, Note, read

KEPT_BYTES = 8 << 20
_WAKE_SECONDS = 1.0  # Python misses a signal that comes between its last check and an endless wait.

Callback = Callable[[Event], object]
_listeners: ContextVar[tuple[Callback, ...]] = ContextVar("listeners", default=())


class EventStream:
    """The newest events of a run, up to KEPT_BYTES of their JSON. Any number of threads may iterate, each over all.

    An iteration begins with the first event that is kept, waits for further ones, and ends with the run. Events are
    kept as lines, so that a run to which nobody listens does not read them back.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._bytes = self._count = 0
        self._closed = False

    def add(self, line: str) -> None:
        """Add the line of an event."""
        with self._changed:
            self._lines.append(line)
            self._count += 1
            self._bytes += len(line)
            while self._bytes > KEPT_BYTES and len(self._lines) > 1:
                self._bytes -= len(self._lines.popleft())
            self._changed.notify_all()

    def close(self) -> None:
        """End every iteration when it has had the last event."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Event]:
        had = 0
        while True:
            with self._changed:
                while not (self._count > had or self._closed):
                    self._changed.wait(_WAKE_SECONDS)
                first = self._count - len(self._lines)
                lines = list(islice(self._lines, max(0, had - first), None))
                missed, had = max(0, first - had), self._count
            if missed:
                yield Note(text=f"{missed:,} events came faster than they were read. events.jsonl has them.")
            yield from map(read, lines)
            if not lines:
                return


@contextmanager
def listen(callback: Callback) -> Iterator[None]:
    """Call `callback(event)` for every event of the runs that are started within the block.

        with tr.listen(lambda event: print(event.kind)):
            model = TorchEstimator(…).fit(df)

    Events are the classes of `tritium.events`, the lines of `events.jsonl` and what the ranks print (`Printed`). The
    callback is called from one thread for each run, in the order of events, with the context variables of the code that
    started the run. One that takes long does not hold the run up; at the end it has 10 s for what is left. What it
    raises does not end the run: the first exception of each run is said, and it is called again for the next event.
    Blocks can be nested: all their callbacks are called. Threads that are started in the block listen only with a copy
    of its context (`contextvars.copy_context`).
    """
    token = _listeners.set((*_listeners.get(), callback))
    try:
        yield
    finally:
        _listeners.reset(token)


def listeners() -> tuple[Callback, ...]:
    """Return the callbacks of the blocks that this code is in."""
    return _listeners.get()
