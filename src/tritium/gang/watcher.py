"""How a rank stands, from what it says itself and from what the machine tells of its process (supervisor)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from tritium.gang import vitals


class Watcher:
    """Puts together the pulse that the coordinator hears. `hear`, `receives` and `look` may come from any thread."""

    def __init__(self, pid: int) -> None:
        now = time.monotonic()
        self.memory = vitals.Memory(pid)
        self.heard: Mapping[str, Any] = {}
        self.output = 0
        """Counts the pieces of output: a rank that prints moves."""
        self._pid = pid
        self._spoke = now
        self._rows: Mapping[str, int] | None = None
        self._lapse = vitals.Lapse(now)
        self._progress, self._arrived = vitals.Still(now), vitals.Still(now)
        self._busy = vitals.Busy(pid, now)
        self._source = source()
        self._source_busy = vitals.Busy(self._source, now) if self._source else None
        self._lock = threading.Lock()

    def hear(self, word: Mapping[str, Any]) -> None:
        """The rank's own word."""
        self.heard, self._spoke = word, time.monotonic()

    def receives(self, rows: Mapping[str, int] | None) -> None:
        """Rows are expected from now on, and counted in this mapping; None: their end has come."""
        self._rows = rows

    def state(self) -> str:
        """The state of its process, as `vitals.state`."""
        return vitals.state(self._pid)

    def look(self) -> dict[str, Any]:
        """The fields of a pulse message. All seconds are as of now."""
        with self._lock:
            now, word, rows = time.monotonic(), self.heard, self._rows
            if lapse := self._lapse.look(now):  # we were stopped ourselves, and the rank perhaps too
                for each in (self._progress, self._arrived, self._busy, self._source_busy):
                    if each is not None:
                        each.forgive(lapse)
                self._spoke += lapse
            self.memory.look()
            silent = now - self._spoke
            arrived = self._arrived.look(None if rows is None else tuple(rows.values()), now)
            if self._source_busy is not None:
                arrived = min(arrived, self._source_busy.look(now))
            return {
                **{key: word[key] for key in ("step", "epoch", "doing", "phase", "taken", "pace") if key in word},
                "seconds": round(word.get("seconds", 0.0) + silent, 3),
                "quiet": round(self._progress.look((word.get("beats"), self.output), now), 3),
                "idle": round(self._busy.look(now), 3),
                "silent": round(silent, 3),
                "state": self.state(),
                "receiving": rows is not None,
                "rows": dict(rows or {}),
                "rows_quiet": round(arrived, 3),
            }


def source() -> int | None:
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
