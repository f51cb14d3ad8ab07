"""Start a rank process as a child that ends with its parent (supervisor)."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tritium import ship

# The package is on the path before its first import; the zip goes first, an installed package stays where it was.
_BOOT = """
import os, sys
home = sys.argv[1]
sys.path.insert(0, home) if not os.path.isdir(home) else sys.path.append(home)
from tritium.gang.rank import main
main(sys.argv[2])
"""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class RankProcess:
    """A child in a process group of its own, so that what it started ends with it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.stdout: IO[bytes] | None = process.stdout
        self.stderr: IO[bytes] | None = process.stderr
        self.peak: int | None = None
        """Bytes of memory that the ended process had at most; None where its parent's hide them."""
        # The kernel begins a child's count with what its parent had when it started it.
        self._inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._lock = threading.Lock()
        self._ended = False

    def wait(self) -> int:
        """Wait for its end, and end what it started too; returns its exit code, or minus the signal's number."""
        # Looked at without being collected, so that its number is still its own when the group is killed.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.kill_group()
        with self._lock:
            self._ended = True
            _, status, usage = os.wait4(self.pid, 0)  # as Popen.wait, and tells what the process used
            self._process.returncode = os.waitstatus_to_exitcode(status)
            if usage.ru_maxrss > self._inherited:
                self.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            return self._process.returncode

    def send_signal(self, number: int) -> None:
        """A signal to the rank alone; nothing when it has ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._ended:
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """SIGKILL to the rank and to everything it started; nothing when they have ended."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._ended:
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def start_rank(settings: Mapping[str, Any], *, keep: Sequence[int], env: Mapping[str, str], cpus: int) -> RankProcess:
    """Start a rank process. The calling thread must live as long as the rank: the kernel ends the child with it.

    `keep` are the file descriptors it inherits under their own numbers.
    """
    environment = dict(os.environ)
    for name in THREADS:
        environment[name] = str(cpus)
    environment["PYTHONUNBUFFERED"] = "1"
    for name in ("SPARK_ENV_LOADED", "PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_PORT"):
        environment.pop(name, None)
    environment.update(env)
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, ship.home(), json.dumps(dict(settings))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        pass_fds=tuple(keep),
        start_new_session=True,
    )
    return RankProcess(process)
