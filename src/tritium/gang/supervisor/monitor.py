"""The status of a rank, from its progress page and from /proc (supervisor)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

from tritium.gang.failure import Failure
from tritium.gang.rank.progress_page import ProgressPage
from tritium.gang.supervisor import process_stats
from tritium.gang.supervisor.memory import Memory
from tritium.gang.supervisor.output import RankOutput
from tritium.gang.supervisor.process import RankProcess
from tritium.gang.supervisor.stacks import SIGNAL, Stacks, in_collective, main_thread, where
from tritium.shown import signal_name

_STEPS_TO_KNOW_INTERVAL = 3
_INTERVALS_ALLOWED = 10
"""A rank may take so many times its longest interval for its next logged step."""


class Monitor:
    """Reads a rank's status and stacks for the coordinator. Thread-safe, once `watch` was called."""

    def __init__(self, output: RankOutput) -> None:
        self._output = output  # Read, as a rank that prints makes progress.
        self._page, self._stacks = ProgressPage(), Stacks()
        self._rows: Mapping[str, int] | None = None
        self._lock = threading.Lock()

    @property
    def fds(self) -> tuple[int, int]:
        """The file descriptors that the rank inherits: of its progress page, and of the file for its stacks."""
        return self._page.fd, self._stacks.file.fileno()

    @property
    def settings(self) -> dict[str, int]:
        """The rank's settings: its two descriptors, and the signal at which it writes its stacks."""
        return {"progress": self._page.fd, "stacks": self._stacks.file.fileno(), "signal": SIGNAL}

    def watch(self, process: RankProcess) -> None:
        """Begin to monitor this process."""
        now = time.monotonic()
        self._process = process
        self._begun = now
        self._lapse = process_stats.Lapse(now)
        self._progress, self._arrived = process_stats.Still(now), process_stats.Still(now)
        self._watch_pid(now)
        source = process_stats.jvm_above()
        self._source = process_stats.Busy(source, now, whole=False) if source else None
        self._logs = _Logs(now)

    def _watch_pid(self, now: float) -> None:
        self._pid = self._process.pid
        self._memory = Memory(self._pid)
        self._busy = process_stats.Busy(self._pid, now)

    def receives(self, rows: Mapping[str, int] | None) -> None:
        """Set the mapping that counts the rows that arrive, by name; None when all have arrived."""
        self._rows = rows

    def place(self) -> dict[str, Any]:
        """Return the rank's last step and phase, also after its end."""
        word = self._page.read()
        return {"step": word.get("step"), "phase": word["phase"]}

    def memory(self) -> dict[str, Any]:
        """Return the memory figures of a rank that was killed; see `Memory.figures`."""
        return self._memory.figures(self._process.peak)

    def failure(self, code: int, rank: int, host: str) -> Failure:
        """Return the failure of a rank that has ended with this exit code; below 0, minus a signal's number."""
        facts: dict[str, Any] = {"rank": rank, "host": host, "pid": self._process.pid, "at": self.place()}
        if code >= 0:
            return Failure(how="exit", exit_code=code, **facts)
        if code == -signal.SIGKILL:
            facts["memory"] = self.memory()
        return Failure(how="signal", signal=signal_name(-code), exit_code=code, **facts)

    def stacks(self) -> tuple[str, dict[str, str]]:
        """Return the stacks of all threads, and facts: `where` the main thread is, its `collective`, `why` none came.

        Takes up to `stacks.ANSWER_SECONDS`.
        """
        word, state = self._page.read(), process_stats.state(self._process.pid)
        text, why = "", "it has only just started"
        if word["changes"]:  # Before its first update it may lack the signal handler.
            text = "" if state == "T" else self._stacks.ask(self._process)
            why = "" if text else _why_no_answer(state)
        frames = main_thread(text, word["main"])
        return text, {"where": where(frames), "collective": in_collective(frames), "why": why}

    def close(self) -> None:
        """Close the progress page and the file of the stacks."""
        self._page.close()
        self._stacks.close()

    def look(self) -> dict[str, Any]:
        """Return the fields of a `status` message. All seconds are as of now."""
        with self._lock:
            now, word, rows = time.monotonic(), self._page.read(), self._rows
            if self._process.pid != self._pid:  # The server has forked the rank, which now has its own pid.
                self._watch_pid(now)
            if lapse := self._lapse.look(now):  # This process was stopped, and perhaps the rank, too.
                for measure in (self._progress, self._arrived, self._busy, self._source):
                    if measure is not None:
                        measure.forgive(lapse)
            self._memory.look()
            arrived = self._arrived.look(None if rows is None else tuple(rows.values()), now)
            if self._source is not None:
                arrived = min(arrived, self._source.look(now))
            return {
                **{key: word[key] for key in ("step", "epoch", "doing", "phase", "taken") if key in word},
                "step_limit": 0.0 if word["taken"] else self._logs.look(word["logged"], now),
                "seconds": round(now - (word["since"] or self._begun), 3),
                "quiet": round(self._progress.look((word["changes"], self._output.pieces), now), 3),
                "idle": round(self._busy.look(now), 3),
                "memory": self._memory.peak,
                "state": process_stats.state(self._process.pid),
                "receiving": rows is not None,
                "rows": dict(rows or {}),
                "rows_quiet": round(arrived, 3),
            }


class _Logs:
    """The limit for the next step of a rank that logs its steps and takes no batches."""

    def __init__(self, now: float) -> None:
        self._count, self._since, self._longest = 0, now, 0.0

    def look(self, logged: int, now: float) -> float | None:
        """Return the limit in seconds; None before the rank has logged _STEPS_TO_KNOW_INTERVAL steps."""
        if logged > self._count:
            self._longest = max(self._longest, now - self._since)
            self._count, self._since = logged, now
        return _INTERVALS_ALLOWED * self._longest if logged >= _STEPS_TO_KNOW_INTERVAL else None


def _why_no_answer(state: str) -> str:
    """Return why a rank's process did not write its stacks, by its state."""
    return f"its process is {process_stats.STATES.get(state, 'running, but does not answer a signal')}"
