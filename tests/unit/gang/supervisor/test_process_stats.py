"""What /proc tells of processes, whatever their names are."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tritium.gang.supervisor import process_stats
from tritium.gang.supervisor.memory import Memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

NAMED = """
import pathlib, subprocess, sys
pathlib.Path("/proc/self/comm").write_bytes(sys.argv[1].encode())
code = "from tritium.gang.supervisor.process_stats import jvm_above; print(jvm_above(), flush=True)"
subprocess.run([sys.executable, "-c", code])
print("ended", flush=True)
sys.stdin.read()
"""
CUT = "é" * 8  # 16 bytes, of which the kernel keeps 15


@pytest.fixture(params=[CUT, "a) R (b 1 2 3", "x" * 15])
def named(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    """Yield the pid of a process of this name, and what a child of it says of the JVM among its parents."""
    command = [sys.executable, "-c", NAMED, request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            found = process.stdout.readline()
            if request.param == CUT:
                with pytest.raises(UnicodeDecodeError):
                    Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
            yield process.pid, found
        finally:
            process.stdin.close()
            process.wait()


def test_the_jvm_is_looked_for_among_parents_of_any_name(named: tuple[int, str]) -> None:
    assert named[1] == "None\n"


def test_a_process_is_looked_at_whatever_its_name_is(named: tuple[int, str]) -> None:
    pid, deadline = named[0], time.monotonic() + 10
    while (state := process_stats.state(pid)) != "S":
        assert time.monotonic() < deadline, state
        time.sleep(0.01)
    assert process_stats.cpu_seconds(pid, whole=False)


def test_its_memory_is_measured_whatever_its_name_is(named: tuple[int, str]) -> None:
    memory = Memory(named[0])
    memory.look()
    assert memory.figures(None)["peak"] > 1 << 20
