"""How a rank stands, from what it says itself and from what the machine tells of its process (supervisor)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from tritium.gang.rank.progress_page import ProgressPage
from tritium.gang.supervisor import process_stats
from tritium.gang.supervisor.memory import Memory
from tritium.gang.supervisor.output import Output
from tritium.gang.supervisor.process import RankProcess
from tritium.gang.supervisor.stacks import SIGNAL, Stacks, in_collective, main_thread, where

_LOGGED = 3  # logged steps that show how often a rank logs them; it may
_LONGEST = 10  # take so many times its longest interval for the next


class Monitor:
    """Puts together a rank's status for the coordinator, and its stacks. For any thread, after `watch`."""

    def __init__(self, output: Output) -> None:
        self._output = output  # a rank that prints makes progress
        self._page, self._stacks = ProgressPage(), Stacks()
        self._rows: Mapping[str, int] | None = None
        self._lock = threading.Lock()

    @property
    def fds(self) -> tuple[int, int]:
        """What the rank inherits: where it writes its progress, and where its stacks."""
        return self._page.fd, self._stacks.file.fileno()

    @property
    def settings(self) -> dict[str, int]:
        """What the rank is told: its descriptors, and the signal at which it writes its stacks."""
        return {"progress": self._page.fd, "stacks": self._stacks.file.fileno(), "signal": SIGNAL}

    def watch(self, process: RankProcess) -> None:
        """From now on, this process."""
        now, pid = time.monotonic(), process.pid
        self._process = process
        self._memory = Memory(pid)
        self._begun = now
        self._lapse = process_stats.Lapse(now)
        self._progress, self._arrived = process_stats.Still(now), process_stats.Still(now)
        self._busy = process_stats.Busy(pid, now)
        source = _source()
        self._source = process_stats.Busy(source, now, whole=False) if source else None
        self._logs = _Logs(now)

    def receives(self, rows: Mapping[str, int] | None) -> None:
        """Rows are expected from now on, and counted in this mapping; None: their end has come."""
        self._rows = rows

    def place(self) -> dict[str, Any]:
        """Its last step and phase, also of a rank that has ended."""
        word = self._page.read()
        return {"step": word.get("step"), "phase": word["phase"]}

    def memory(self) -> dict[str, Any]:
        """The figures of a rank that was killed."""
        return self._memory.figures(self._process.peak)

    def stacks(self) -> tuple[str, dict[str, str]]:
        """The stacks of all its threads as it writes them; and in words where its main thread is, or why it can't say.

        Takes up to `stacks.ANSWER_SECONDS`.
        """
        word, state = self._page.read(), process_stats.state(self._process.pid)
        text, why = "", "it has only just started"
        if word["changes"]:  # before its first word, it would not know the signal
            text = "" if state == "T" else self._stacks.ask(self._process)
            why = "" if text else _why_no_answer(state)
        frames = main_thread(text, word["main"])
        return text, {"where": where(frames), "collective": in_collective(frames), "why": why}

    def close(self) -> None:
        """Let go of what the rank wrote to."""
        self._page.close()
        self._stacks.close()

    def look(self) -> dict[str, Any]:
        """The fields of a status message. All seconds are as of now."""
        with self._lock:
            now, word, rows = time.monotonic(), self._page.read(), self._rows
            if lapse := self._lapse.look(now):  # we were stopped ourselves, and the rank perhaps too
                for each in (self._progress, self._arrived, self._busy, self._source):
                    if each is not None:
                        each.forgive(lapse)
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
                "state": process_stats.state(self._process.pid),
                "receiving": rows is not None,
                "rows": dict(rows or {}),
                "rows_quiet": round(arrived, 3),
            }


class _Logs:
    """How long to wait for the next step of a rank that only logs them, at intervals of its own."""

    def __init__(self, now: float) -> None:
        self._count, self._since, self._longest = 0, now, 0.0

    def look(self, logged: int, now: float) -> float | None:
        """Seconds; None while it is not known how often it logs."""
        if logged > self._count:
            self._longest = max(self._longest, now - self._since)
            self._count, self._since = logged, now
        return _LONGEST * self._longest if logged >= _LOGGED else None


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


def _why_no_answer(state: str) -> str:
    """Why a rank's process did not write its stacks."""
    return f"its process is {process_stats.STATES.get(state, 'running, but does not answer a signal')}"
