"""What the machine tells of a rank's process: its state, its CPU time, its memory (supervisor).

All of it comes from /proc and the cgroup files of Linux; elsewhere nothing is known, and nothing is said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_LEAST = 0.1  # seconds of CPU that count as work, and
_SHARE = 0.05  # the share of a core below which a process does nothing: heartbeats, idle threads
_LAPSE = 5.0  # between two looks, beyond which this process itself did not run

_UNLIMITED = 1 << 60
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


class Memory:
    """The memory of a rank's host and control group: looked at while it lives, told when it was killed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._group = _Group(None, "")
        self._killed = 0
        self._free: list[int] = []
        self._peak: int | None = None

    def look(self) -> None:
        """From time to time: what is free now, and how many the kernel has killed in the group so far."""
        self._free = [*self._free[-4:], _meminfo().get("MemAvailable", 0)]
        self._peak = _high_water(self._pid) or self._peak
        group = _group(self._pid)
        if group.folder is not None and group != self._group:
            self._group, self._killed = group, group.killed()

    def figures(self, peak: int | None) -> dict[str, Any]:
        """In bytes: the rank's `peak` (None: as it was seen last), its host's memory and what was free of it, its
        group's limit, peak and kills."""
        host = _meminfo()
        free = [*self._free, host.get("MemAvailable", 0)]
        found: dict[str, Any] = {
            "peak": peak or self._peak,
            "host_total": host.get("MemTotal"),
            "host_available": min(free),
        }
        if not host:
            found.update(host_total=None, host_available=None)
        if self._group.folder is not None:
            found["group"] = str(self._group.folder)
            found["group_limit"] = self._group.limit()
            found["group_peak"] = self._group.number(self._group.names["peak"])
            found["oom_kills"] = self._await_kill()
        return found

    def _await_kill(self) -> int:
        # The kernel counts a kill a moment after it has killed.
        deadline = time.monotonic() + 0.2
        while not (more := self._group.killed() - self._killed) and time.monotonic() < deadline:
            time.sleep(0.02)
        return more


class _Group:
    """One memory control group: version 1 or 2."""

    def __init__(self, folder: Path | None, version: str) -> None:
        self.folder = folder
        v2 = version == "2"
        self.names = {
            "limit": "memory.max" if v2 else "memory.limit_in_bytes",
            "peak": "memory.peak" if v2 else "memory.max_usage_in_bytes",
            "events": "memory.events" if v2 else "memory.oom_control",
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Group) and self.folder == other.folder

    def __hash__(self) -> int:
        return hash(self.folder)

    def number(self, name: str, folder: Path | None = None) -> int | None:
        folder = folder or self.folder
        try:
            text = (folder / name).read_text().strip() if folder else "max"
        except OSError:
            return None
        return int(text) if text.isdigit() and int(text) < _UNLIMITED else None

    def limit(self) -> int | None:
        """The least limit of the group and of those around it that can be seen here."""
        found, folder = [], self.folder
        while folder is not None and folder != _CGROUPS and _CGROUPS in folder.parents:
            found.append(self.number(self.names["limit"], folder))
            folder = folder.parent
        if self.folder == _CGROUPS:
            found.append(self.number(self.names["limit"]))
        return min((limit for limit in found if limit is not None), default=None)

    def killed(self) -> int:
        """How many of its processes the kernel has killed for want of memory."""
        try:
            lines = (self.folder / self.names["events"]).read_text().splitlines() if self.folder else []
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _group(pid: int) -> _Group:
    """The memory group of a process. In a container its path is not to be found, and the root is its own."""
    try:
        lines = (_PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return _Group(None, "")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, version, events = _CGROUPS / "memory", "1", "memory.oom_control"
        elif controllers == "" and (_CGROUPS / "cgroup.controllers").exists():
            root, version, events = _CGROUPS, "2", "memory.events"
        else:
            continue
        for folder in (root / path.lstrip("/"), root):
            if (folder / events).exists():
                return _Group(folder, version)
    return _Group(None, "")


def _meminfo() -> dict[str, int]:
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()[:3]
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def _high_water(pid: int) -> int | None:
    """Bytes of memory that a living process had at most."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def size(count: float | None) -> str:
    """1.2e9 → "1.2 GB"; "?" for None."""
    if count is None:
        return "?"
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}".replace(".0 ", " ")
    return f"{count / 1024:.0f} KB"


def from_outside(memory: Mapping[str, Any]) -> bool:
    """Whether the figures of a rank that was killed by SIGKILL speak against a lack of memory, so that someone did it.

    They do when all of these are known: the kernel counted no kill in the rank's cgroup, the group stayed below 95 % of
    its limit, and the host would have kept a tenth of its memory had the rank taken its whole peak at once, since the
    last look.
    """
    if memory.get("oom_kills") != 0 or not (memory.get("peak") and memory.get("host_total")):
        return False
    limit, most = memory.get("group_limit"), memory.get("group_peak")
    if limit and (most is None or most > 0.95 * limit):
        return False
    return bool(memory["host_available"] - memory["peak"] > 0.1 * memory["host_total"])


def killed_for(memory: Mapping[str, Any]) -> str:
    """Why a rank that was killed by SIGKILL was killed, as far as its memory tells."""
    if not memory:
        return "probably out of memory, unless someone killed it"
    peak = size(memory["peak"]) if memory.get("peak") else "unknown"
    limit = memory.get("group_limit")
    if memory.get("oom_kills"):
        where = f"its cgroup's limit of {size(limit)} was reached" if limit else "the memory of the host was used up"
        return f"out of memory ({where}: oom_kill {memory['oom_kills']}; peak {peak})"
    free, total = memory.get("host_available"), memory.get("host_total")
    host = f"; the host had {size(free)} of {size(total)} available" if total else ""
    group = f"; its cgroup's limit is {size(limit)}" if limit else ""
    why = "probably out of memory, unless someone killed it"
    why = "from outside, not for want of memory" if from_outside(memory) else why
    return f"{why} (peak {peak}{group}{host})"
