"""End a rank's process group, but let those processes finish that clean up after it (rank, supervisor)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

# The resource trackers of multiprocessing and joblib remove the shared memory and the semaphores of killed processes,
# once the last of these has ended.
_CLEANER = b"resource_tracker import main"
CLEANING_SECONDS = 1.0  # Cleaning takes milliseconds, unless it waits for a process of another group.
_LOOK_SECONDS = 0.005  # Polled, as Conda's Python lacks os.pidfd_open, which makes the end of a non-child an event.


def kill_group(leader: int) -> None:
    """Send SIGKILL to the processes of the group, but not to those that clean up after the others and then end.

    leader : the process that the group is named by, alive or not reaped yet. Raises nothing where it is gone.
    """
    cleaners = set(_cleaners(leader))
    killed: set[int] = set()
    while cleaners and (others := {*_members(leader)} - cleaners - killed):  # They may have forked meanwhile.
        _kill(others)
        killed |= others
    if not cleaners:
        _kill_all(leader)


def end_group(leader: int) -> None:
    """Do as `kill_group`, wait until the group's other processes have ended, too, and kill those that do not."""
    kill_group(leader)
    deadline = time.monotonic() + CLEANING_SECONDS
    while _is_running(leader) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    _kill_all(leader)


def _is_running(group: int) -> bool:
    """Tell whether a process of the group but its leader has not ended yet (Linux)."""
    for pid in _members(group) if sys.platform == "linux" else ():
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
            if pid != group and stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                return True
    return False


def _members(group: int) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(ProcessLookupError):
                if os.getpgid(int(name)) == group:
                    yield int(name)


def _cleaners(group: int) -> Iterator[int]:
    if sys.platform != "linux":
        return
    for pid in _members(group):
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command:
            if _CLEANER in command.read():
                yield pid


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _kill_all(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
