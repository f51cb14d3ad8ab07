"""Read the state and CPU time of a process from /proc (supervisor, driver).

On systems other than Linux nothing is known: the state is empty, and a process counts as busy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_EXECUTOR_ID = "--executor-id"
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_IDLE_SECONDS = 0.1
"""A process that used no more CPU time between two looks counts as idle."""
_IDLE_SHARE = 0.05
"""So does one that used no more than this share of a core, as heartbeats and idle threads do."""
_LAPSE_SECONDS = 5.0
"""A longer time between two looks means that this process itself was stopped."""

STATES = {
    "T": "stopped (SIGSTOP, or Ctrl-Z)",
    "t": "stopped by a debugger",
    "D": "uninterruptible in the kernel (a disk or network drive that does not answer)",
    "Z": "ended",
}


class Busy:
    """Measures how long a process has used nearly no CPU. Call `look` periodically.

    whole : whether its children count, too.
    """

    def __init__(self, pid: int, now: float, *, whole: bool = True) -> None:
        self._pid = pid
        self._whole = whole
        self._since = now
        self._used = 0.0

    def look(self, now: float) -> float:
        """Return the seconds since it last used CPU; 0 where that is not known."""
        used = cpu_seconds(self._pid, self._whole)
        if (
            used is None
            or used < self._used
            or used - self._used > max(_IDLE_SECONDS, _IDLE_SHARE * (now - self._since))
        ):
            self._since, self._used = now, used or 0.0
        return now - self._since

    def forgive(self, seconds: float) -> None:
        """Do not count `seconds` in which this process was stopped, and perhaps the other one too."""
        self._since += seconds


class Still:
    """Measures how long a value has not changed. Call `look` periodically."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._value: Any = None

    def look(self, value: Any, now: float) -> float:
        """Return the seconds since the value last changed."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since

    def forgive(self, seconds: float) -> None:
        """Do as `Busy.forgive`."""
        self._since += seconds


class Lapse:
    """Detects that this process itself was stopped between two looks (a suspended machine, SIGSTOP)."""

    def __init__(self, now: float) -> None:
        self._last = now

    def look(self, now: float) -> float:
        """Return the seconds for which it was stopped; 0 if it was not."""
        gap, self._last = now - self._last, now
        return gap if gap > _LAPSE_SECONDS else 0.0


def state(pid: int) -> str:
    """Return the letter of /proc/<pid>/stat: R, S, D, T (stopped), t (traced), Z; empty when it is not known."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def cpu_seconds(pid: int, whole: bool = True) -> float | None:
    """Return the CPU time of a process in seconds; None when it is not known.

    whole : whether its children count, too, also those that have ended.
    """
    fields = _stat(pid)
    if not fields:
        return None
    if not whole:
        return (int(fields[11]) + int(fields[12])) * _TICK
    # The fields are utime, stime, and those of the children that were waited for.
    seconds = sum(int(part) for part in fields[11:15]) * _TICK
    return seconds + sum(cpu_seconds(child) or 0.0 for child in _children(pid))


def _stat(pid: int) -> list[str]:
    """Return the fields after the name, which may hold spaces, parentheses, and a character that the kernel has cut."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _children(pid: int) -> Iterator[int]:
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return
    for thread in threads:
        try:
            text = (_PROC / str(pid) / "task" / thread / "children").read_text()
        except OSError:  # The thread has ended, or the kernel lacks this file.
            continue
        yield from map(int, text.split())


def jvm_above() -> int | None:
    """Return the pid of the JVM above this process: that of the executor, which computes the rows; or None (Linux)."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return None
        if name == "java":
            return pid
        pid = int(rest.split()[1])
    return None


def spark_executor() -> str:
    """Return Spark's id of the executor above this process, by its command line; "" where there is none (Linux)."""
    try:
        with open(f"/proc/{jvm_above()}/cmdline", errors="replace") as file:
            words = file.read().split("\0")
    except OSError:
        return ""
    return words[words.index(_EXECUTOR_ID) + 1] if _EXECUTOR_ID in words[:-1] else ""
