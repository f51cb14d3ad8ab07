"""Measure the memory of a rank's process, of its control group and its host (supervisor).

All figures come from /proc and the cgroup files of Linux; elsewhere they are None or absent.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


class Memory:
    """The memory of a rank, its host and its control group: sampled while it lives, reported when it was killed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._group = _Group(None, "")
        self._killed = 0
        self._free: list[int] = []
        self.peak: int | None = None
        """The rank's peak at the last sample, in bytes."""
        self.look()  # A rank may be killed before the first sample of a period.

    def look(self) -> None:
        """Sample the free memory, the rank's peak, and once its group's OOM kills so far. Call it periodically."""
        self._free = [*self._free[-4:], _meminfo().get("MemAvailable", 0)]
        self.peak = _high_water(self._pid) or self.peak
        group = _group(self._pid)
        if group.is_root and self._group.folder is not None:
            return  # Version 1 reports "/" for a process from the moment it begins to end.
        if group.folder is not None and group != self._group:
            self._group, self._killed = group, group.killed()

    def figures(self, peak: int | None) -> dict[str, Any]:
        """Return figures in bytes: the rank's peak, its host's total and available memory, its group's limit and peak.

        Also `group` (its folder) and `oom_kills`. `peak` is the exact one if known; None: the last sample's.
        """
        host = _meminfo()
        free = [*self._free, host.get("MemAvailable", 0)]
        figures: dict[str, Any] = {
            "peak": peak or self.peak,
            "host_total": host.get("MemTotal"),
            "host_available": min(free),
        }
        if not host:
            figures.update(host_total=None, host_available=None)
        if self._group.folder is not None:
            figures["group"] = str(self._group.folder)
            figures["group_limit"] = self._group.limit()
            figures["group_peak"] = self._group.number(self._group.names["peak"])
            figures["oom_kills"] = self._await_kill()
        return figures

    def _await_kill(self) -> int:
        # The kernel increments its counter a moment after the kill.
        deadline = time.monotonic() + 0.2
        while not (more := self._group.killed() - self._killed) and time.monotonic() < deadline:
            time.sleep(0.02)
        return more


class _Group:
    """One memory control group, of version 1 or 2."""

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

    @property
    def is_root(self) -> bool:
        return self.folder in (_CGROUPS, _CGROUPS / "memory")

    def number(self, name: str, folder: Path | None = None) -> int | None:
        folder = folder or self.folder
        try:
            text = (folder / name).read_text().strip() if folder else "max"
        except OSError:
            return None
        return int(text) if text.isdigit() and int(text) < _UNLIMITED else None

    def limit(self) -> int | None:
        """Return the least limit of the group and its visible parents, in bytes; None without any."""
        limits, folder = [], self.folder
        while folder is not None and folder != _CGROUPS and _CGROUPS in folder.parents:
            limits.append(self.number(self.names["limit"], folder))
            folder = folder.parent
        if self.folder == _CGROUPS:
            limits.append(self.number(self.names["limit"]))
        return min((limit for limit in limits if limit is not None), default=None)

    def killed(self) -> int:
        """Return the number of OOM kills in the group."""
        try:
            lines = (self.folder / self.names["events"]).read_text().splitlines() if self.folder else []
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _group(pid: int) -> _Group:
    """Return the memory group of a process; in a container, where its path does not exist, the root."""
    try:
        lines = (_PROC / str(pid) / "cgroup").read_text(errors="replace").splitlines()
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
    """Return the peak memory of a living process in bytes, or None."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
