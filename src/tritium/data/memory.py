"""The memory that this process may use (any process)."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def memory_limit(cgroups: Path = _CGROUP, group: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of the machine's memory, or fewer where a cgroup (1 or 2) limits this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in group.read_text().splitlines() if group.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _upwards(cgroups, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _upwards(cgroups / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def _upwards(root: Path, path: str, name: str) -> list[int]:
    """Return the limits of a group and of all groups around it; in a container the outer ones can't be seen."""
    inside = Path(path.lstrip("/"))
    files = [root / group / name for group in (inside, *inside.parents)]
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text != "max"]
