"""What the machine tells of a process: its state, its CPU time (supervisor, driver).

All of it comes from /proc of Linux; elsewhere nothing is known, and nothing is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_LEAST = 0.1  # seconds of CPU that count as work, and
_SHARE = 0.05  # the share of a core below which a process does nothing: heartbeats, idle threads
_LAPSE = 5.0  # between two looks, beyond which this process itself did not run

STATES = {
    "T": "stopped (SIGSTOP, or Ctrl-Z)",
    "t": "stopped by a debugger",
    "D": "uninterruptible in the kernel (a disk or network drive that does not answer)",
    "Z": "ended",
}


class Busy:
    """How long a process, `whole` with all that it started, has used nearly no CPU. `look` from time to time."""

    def __init__(self, pid: int, now: float, *, whole: bool = True) -> None:
        self._pid = pid
        self._whole = whole
        self._since = now
        self._used = 0.0

    def look(self, now: float) -> float:
        """Seconds since it last worked; 0 where that is not known."""
        used = cpu_seconds(self._pid, self._whole)
        if used is None or used < self._used or used - self._used > max(_LEAST, _SHARE * (now - self._since)):
            self._since, self._used = now, used or 0.0
        return now - self._since

    def forgive(self, seconds: float) -> None:
        """This process did not run for so long, and the other perhaps neither."""
        self._since += seconds


class Still:
    """How long a number has not changed, by looks from time to time."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._value: Any = None

    def look(self, value: Any, now: float) -> float:
        """Seconds since the value was first this one."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since

    def forgive(self, seconds: float) -> None:
        """As Busy.forgive."""
        self._since += seconds


class Lapse:
    """Whether this process itself was stopped between two looks (a suspended machine, SIGSTOP)."""

    def __init__(self, now: float) -> None:
        self._last = now

    def look(self, now: float) -> float:
        """Seconds to forgive."""
        gap, self._last = now - self._last, now
        return gap if gap > _LAPSE else 0.0


def state(pid: int) -> str:
    """The letter of /proc/<pid>/stat: R, S, D, T (stopped), t (traced), Z; empty when it is not known."""
    found = _stat(pid)
    return found[0] if found else ""


def cpu_seconds(pid: int, whole: bool = True) -> float | None:
    """CPU time of a process and its threads; `whole` with what it started, those that have ended too.

    None when it is not known.
    """
    found = _stat(pid)
    if not found:
        return None
    if not whole:
        return (int(found[11]) + int(found[12])) * _TICK
    own = sum(int(part) for part in found[11:15]) * _TICK  # utime, stime, and those of children that were waited for
    return own + sum(cpu_seconds(child) or 0.0 for child in _children(pid))


def _stat(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
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
        except OSError:  # the thread has ended, or this kernel does not tell
            continue
        yield from map(int, text.split())
