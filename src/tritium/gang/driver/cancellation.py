"""The request to end a run, which any thread may make (driver)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tritium.errors import RunCancelled


class Cancellation:
    """Whether a run shall end. All attempts of the run share it.

    requested : set once, by `Run.cancel`.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None

    def request(self) -> None:
        """Have the run end. Returns at once. A second request must not interrupt what the first one's clean-up does."""
        with self._lock:
            first = not self.requested.is_set()
            self.requested.set()
            if first and self._interrupt is not None:
                self._interrupt()

    def check(self) -> None:
        """Raise RunCancelled if the run shall end."""
        if self.requested.is_set():
            raise RunCancelled("The run was cancelled by Run.cancel(); all its ranks have been ended.")

    def pause(self, seconds: float) -> None:
        """Wait. Raises RunCancelled as soon as the run shall end."""
        self.requested.wait(seconds)
        self.check()

    @contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Call `interrupt` when the run shall end within the block. Raises RunCancelled where it shall already."""
        with self._lock:
            self._interrupt = interrupt
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._interrupt = None
