"""What cleans up after a killed process has the time to, and nothing of its group stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters import wait
from tritium.gang.rank import process_group
from tritium.gang.rank.process_group import end_group, kill_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

# Makes named memory, which multiprocessing's resource tracker is to remove; starts a child that has the tracker's pipe.
PROGRAM = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
name, apart = sys.argv[1:]
memory = shared_memory.SharedMemory(name, create=True, size=1 << 12)
tracker = resource_tracker._resource_tracker
child = os.fork()
if child == 0:
    if apart == "apart":
        os.setsid()
    print(os.getpid(), tracker._pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    """The place of the shared memory of this test."""
    place = Path(f"/dev/shm/tritium-test-{os.getpid()}")
    yield place
    place.unlink(missing_ok=True)


def started(place: Path, apart: str = "") -> tuple[subprocess.Popen[bytes], int, int]:
    """Start the program in a group of its own. Returns it, and the pids of its child and of its tracker."""
    command = [sys.executable, "-c", PROGRAM, place.name, apart]
    program = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert program.stdout is not None
    child, tracker = map(int, program.stdout.readline().split())
    program.stdout.close()
    assert place.exists()
    return program, child, tracker


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_shared_memory_of_a_killed_process_is_removed(memory: Path) -> None:
    program, child, tracker = started(memory)
    kill_group(program.pid)
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    end_group(program.pid)
    assert not memory.exists()
    assert not alive(child)
    assert not alive(tracker)
    assert program.wait() == -signal.SIGKILL
    end_group(program.pid)  # nothing of it is there


def test_one_that_does_not_end_is_killed(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "CLEANING_SECONDS", 0.2)
    program, child, tracker = started(memory, "apart")  # the child keeps the tracker's pipe open
    began = time.monotonic()
    end_group(program.pid)
    assert time.monotonic() - began >= 0.2
    program.wait()
    assert alive(child)
    os.kill(child, signal.SIGKILL)
    wait(lambda: not alive(tracker), "the tracker is killed")


def test_a_group_without_one_is_killed_at_once() -> None:
    program = subprocess.Popen(["sleep", "600"], start_new_session=True)
    end_group(program.pid)
    assert program.wait() == -signal.SIGKILL
