"""How a rank stands, from what it says itself and from what the machine tells of its process (supervisor)."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from tritium.gang import vitals
from tritium.gang.pulse import Page

_STEPS = 64  # the pace is the median of so many looks that saw steps
_ENOUGH = 10


class Watcher:
    """Puts together the pulse that the coordinator hears. `receives` and `look` may come from any thread."""

    def __init__(self, pid: int, page: Page) -> None:
        now = time.monotonic()
        self.memory = vitals.Memory(pid)
        self.output = 0
        """Counts the pieces of output: a rank that prints moves."""
        self._pid = pid
        self._page = page
        self._begun = now
        self._rows: Mapping[str, int] | None = None
        self._lapse = vitals.Lapse(now)
        self._progress, self._arrived = vitals.Still(now), vitals.Still(now)
        self._busy = vitals.Busy(pid, now)
        source = _source()
        self._source = vitals.Busy(source, now) if source else None
        self._pace = _Pace()
        self._lock = threading.Lock()

    def receives(self, rows: Mapping[str, int] | None) -> None:
        """Rows are expected from now on, and counted in this mapping; None: their end has come."""
        self._rows = rows

    def state(self) -> str:
        """The state of its process, as `vitals.state`."""
        return vitals.state(self._pid)

    def look(self) -> dict[str, Any]:
        """The fields of a pulse message. All seconds are as of now."""
        with self._lock:
            now, word, rows = time.monotonic(), self._page.read(), self._rows
            if lapse := self._lapse.look(now):  # we were stopped ourselves, and the rank perhaps too
                for each in (self._progress, self._arrived, self._busy, self._source):
                    if each is not None:
                        each.forgive(lapse)
            self.memory.look()
            arrived = self._arrived.look(None if rows is None else tuple(rows.values()), now)
            if self._source is not None:
                arrived = min(arrived, self._source.look(now))
            return {
                **{key: word[key] for key in ("step", "epoch", "doing", "phase", "taken") if key in word},
                "pace": self._pace.look(word["taken"], now),
                "seconds": round(now - (word["since"] or self._begun), 3),
                "quiet": round(self._progress.look((word["beats"], self.output), now), 3),
                "idle": round(self._busy.look(now), 3),
                "state": self.state(),
                "receiving": rows is not None,
                "rows": dict(rows or {}),
                "rows_quiet": round(arrived, 3),
            }


class _Pace:
    """Seconds of a step, from looks at how many were taken."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._seen: deque[float] = deque(maxlen=_STEPS)

    def look(self, taken: int, now: float) -> float | None:
        """The median; None until enough looks have seen steps."""
        if self._last is None or taken > self._last[0]:
            if self._last is not None and self._last[0]:
                self._seen.append((now - self._last[1]) / (taken - self._last[0]))
            self._last = (taken, now)
        return round(statistics.median(self._seen), 6) if len(self._seen) >= _ENOUGH else None


def _source() -> int | None:
    """The JVM that computes and sends the rows, where this process is a Python worker of Spark's (Linux)."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return None
        if name == "java":
            return pid
        pid = int(rest.split()[1])
    return None
