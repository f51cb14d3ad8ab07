"""Start a rank process as a child that ends with its parent (supervisor)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
from tritium.errors import BadSetting

# The package is on the path before its first import; the zip goes first, an installed package stays where it was.
_BOOT = """
import os, sys
home = sys.argv[1]
sys.path.insert(0, home) if not os.path.isdir(home) else sys.path.append(home)
from tritium.gang.rank.main import main
main(sys.argv[2])
"""
_PYSPARK_MEMORY = "PYSPARK_EXECUTOR_MEMORY_MB"  # how Spark tells its worker
_CAP_SYS_RESOURCE = 24
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
        await_exit(self.pid)
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


# idtype P_PID and the options WEXITED | WNOWAIT, from each system's <sys/wait.h>
_WAITID = {"linux": (1, 4 | 0x01000000), "darwin": (1, 4 | 0x20)}


def await_exit(pid: int) -> None:
    """Wait until a child has ended, and leave it to be collected: its number is not given to another process before.

    `os.waitid`, which macOS has from Python 3.13 on, or the C library's, which it has always had.
    """
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return
    kind, options = _WAITID[sys.platform]
    waitid = ctypes.CDLL(None, use_errno=True).waitid
    waitid.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_int]
    told = ctypes.create_string_buffer(256)  # a siginfo_t, of 104 bytes on macOS and 128 on Linux
    while waitid(kind, pid, told, options) != 0:
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))


def may_raise_limits() -> bool:
    """Whether this process may raise a hard limit again; also true where there is no such thing as a capability."""
    try:
        with open("/proc/self/status") as status:
            held = next(line for line in status if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return True
    return bool(int(held.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)


def lift_memory_limit(pid: int) -> None:
    """Take from a rank the limit of address space that `spark.executor.pyspark.memory` puts on Spark's worker.

    CUDA and mapped files need many times the memory that they use. Raises BadSetting where this process may not
    raise a hard limit (it takes CAP_SYS_RESOURCE). The container's own limit is left as it is.
    """
    megabytes = os.environ.get(_PYSPARK_MEMORY, "-1")
    if not megabytes.isdecimal() or not hasattr(resource, "prlimit"):
        return
    try:
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (PermissionError, ValueError) as error:
        raise BadSetting(
            f"spark.executor.pyspark.memory limits the address space of Python on the executors (to {megabytes} MB "
            "each), and a rank, whose CUDA and mapped rows need more than that, would inherit it: "
            f"it can't be raised again there ({error}). Start the session without that setting, and give Python its "
            "memory by spark.executor.memoryOverhead.",
            setting="spark.executor.pyspark.memory",
        ) from error


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
    rank = RankProcess(process)
    try:
        lift_memory_limit(rank.pid)
    except BadSetting:
        rank.kill_group()
        rank.wait()
        rank.close()
        raise
    return rank
