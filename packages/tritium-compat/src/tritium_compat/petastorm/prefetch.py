"""Parts of a data set, loaded ahead by threads and given in their order (any process)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tritium_compat.petastorm.load import Loaded

_AHEAD = 256 << 20  # bytes that are loaded ahead, at most, but for two parts


class InOrder:
    """Loads what an iterator names, some of it ahead."""

    def __init__(self, load: Callable[..., Loaded], threads: int, ahead: int) -> None:
        """Set how.

        load : of a part and its place.
        threads : 0: in the thread that asks.
        ahead : how many parts at most.
        """
        self._load, self._ahead, self._most = load, ahead, ahead
        self._pool = ThreadPoolExecutor(threads, "tritium-reader") if threads else None
        self._waiting: deque[Future[Loaded]] = deque()
        self._parts: Iterator[Any] = iter(())

    def start(self, parts: Iterator[Any]) -> None:
        """Begin to load other parts."""
        self._parts = parts
        self._fill()

    def __next__(self) -> list[Any]:
        """Return the next part; StopIteration after the last, and what a load raised."""
        if self._pool is None:
            return self._load(*next(self._parts)).found
        self._fill()
        if not self._waiting:
            raise StopIteration
        loaded = self._waiting.popleft().result()
        self._ahead = max(2, min(self._most, _AHEAD // max(loaded.size, 1)))
        self._fill()
        return loaded.found

    def _fill(self) -> None:
        while self._pool is not None and len(self._waiting) < self._ahead:
            part = next(self._parts, None)
            if part is None:
                return
            self._waiting.append(self._pool.submit(self._load, *part))

    def __len__(self) -> int:
        return sum(each.done() for each in self._waiting)

    def stop(self) -> None:
        """Load nothing more."""
        self._parts = iter(())
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._waiting.clear()

    def join(self) -> None:
        """Wait for the threads' end."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
