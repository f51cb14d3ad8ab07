"""Tell from memory figures why a rank was killed by SIGKILL (any process)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def size(count: float | None) -> str:
    """Format bytes: 1.2 * 2**30 → "1.2 GB"; "?" for None."""
    if count is None:
        return "?"
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}".replace(".0 ", " ")
    return f"{count / 1024:.0f} KB"


def from_outside(memory: Mapping[str, Any]) -> bool:
    """Tell whether a rank was killed by a process or a person, not for lack of memory.

    True when all of this is known: the kernel counted no kill in the rank's cgroup, the group stayed below 95 % of its
    limit, and of the host's available memory, less the rank's whole peak, more than a tenth of the total remains.
    """
    if memory.get("oom_kills") != 0 or not (memory.get("peak") and memory.get("host_total")):
        return False
    limit, most = memory.get("group_limit"), memory.get("group_peak")
    if limit and (most is None or most > 0.95 * limit):
        return False
    return bool(memory["host_available"] - memory["peak"] > 0.1 * memory["host_total"])


def killed_for(memory: Mapping[str, Any]) -> str:
    """Return the probable reason of a SIGKILL, with the figures.

    memory : the result of `Memory.figures`, or empty.
    """
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
