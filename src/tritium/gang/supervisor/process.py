"""A rank process, and how one is started as a child that ends with its parent (supervisor)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tritium import ship
from tritium.errors import BadSetting
from tritium.gang.rank.process_group import end_group, kill_group

# Puts the package on the path before its first import: a zip first; an installed package last, as it was before.
_BOOT = """
import os, sys
home = sys.argv[1]
sys.path.insert(0, home) if not os.path.isdir(home) else sys.path.append(home)
from tritium.gang.rank.main import main
main(sys.argv[2])
"""
_PYSPARK_MEMORY = "PYSPARK_EXECUTOR_MEMORY_MB"
"""Spark sets it in its Python workers."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class RankProcess(ABC):
    """A rank, in a process group of its own, so that its own children can be ended with it."""

    def __init__(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.peak: int | None = None
        """Peak memory of the ended process in bytes; None where that is not known."""
        self._lock = threading.Lock()
        self._ended = False

    @property
    @abstractmethod
    def pid(self) -> int:
        """The pid of the rank."""

    @abstractmethod
    def wait(self) -> int:
        """Wait for the end of the process, end its group, and return its exit code, or minus the signal's number."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Send a signal to the rank alone; does nothing when it has ended."""

    @abstractmethod
    def kill_group(self) -> None:
        """Send SIGKILL to the rank and its children; does nothing when the rank has ended.

        Not to those children that clean up after it when it has ended, for which `wait` waits.
        """

    def close(self) -> None:
        """Close the pipes."""
        self.stdout.close()
        self.stderr.close()


class SpawnedRank(RankProcess):
    """A rank in a Python of its own, a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        super().__init__(process.stdout, process.stderr)
        self._process = process
        # The kernel begins the count of a child with its parent's peak at that time, which hides a lower one.
        self._inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @property
    def pid(self) -> int:
        """The pid of the rank."""
        return self._process.pid

    def wait(self) -> int:
        """Do as `RankProcess.wait`."""
        # It is not reaped before its group is killed, so that its pid can't belong to another process by then.
        try:
            await_exit(self.pid)
        except ChildProcessError:  # The kernel reaps it where the program ignores SIGCHLD.
            end_group(self.pid)
            with self._lock:
                self._ended = True
                self._process.returncode = 0  # Popen does so, too, where the exit code is lost.
                return 0
        end_group(self.pid)
        with self._lock:
            self._ended = True
            _, status, usage = os.wait4(self.pid, 0)  # Popen.wait would lose the resource usage.
            self._process.returncode = os.waitstatus_to_exitcode(status)
            if usage.ru_maxrss > self._inherited:
                self.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            return self._process.returncode

    def send_signal(self, number: int) -> None:
        """Do as `RankProcess.send_signal`."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._ended:
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Do as `RankProcess.kill_group`."""
        with self._lock:
            if not self._ended:
                kill_group(self.pid)


# From each system's <sys/wait.h>: the idtype P_PID, and the options WEXITED | WNOWAIT.
_WAITID = {"linux": (1, 4 | 0x01000000), "darwin": (1, 4 | 0x20)}


def await_exit(pid: int) -> None:
    """Wait until a child has ended, without reaping it: its pid is not reused until then.

    Uses `os.waitid`, or the C library's on macOS before Python 3.13.
    """
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return
    kind, options = _WAITID[sys.platform]
    waitid = ctypes.CDLL(None, use_errno=True).waitid
    waitid.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_int]
    siginfo = ctypes.create_string_buffer(256)  # It has 104 bytes on macOS and 128 on Linux.
    while waitid(kind, pid, siginfo, options) != 0:
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))


def lift_memory_limit(pid: int) -> None:
    """Remove the limit of address space that a rank inherits with `spark.executor.pyspark.memory`.

    CUDA and mapped files need far more address space than memory. Raises BadSetting where this process may not raise a
    hard limit (that takes CAP_SYS_RESOURCE). The container's own limit stays.
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


def spawn_rank(settings: Mapping[str, Any], *, keep: Sequence[int], env: Mapping[str, str], cpus: int) -> SpawnedRank:
    """Start a rank in a Python of its own. The calling thread must outlive it: the kernel kills the child with it.

    keep : the file descriptors that it inherits, under the same numbers.
    cpus : the number of threads of OpenMP and the like.

    Raises BadSetting as `lift_memory_limit` does.
    """
    argument = json.dumps({**settings, "parent": os.getpid()})
    pipe = subprocess.PIPE
    process = start_python(_BOOT, [argument], environment=environment(env, cpus), stdout=pipe, stderr=pipe, keep=keep)
    rank = SpawnedRank(process)
    try:
        lift_memory_limit(rank.pid)
    except BadSetting:
        rank.kill_group()
        rank.wait()
        rank.close()
        raise
    return rank


def start_python(
    boot: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    keep: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Start a Python that runs `boot` with this package's place and `arguments`, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", boot, ship.home(), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        pass_fds=tuple(keep),
        start_new_session=True,
    )


def environment(env: Mapping[str, str], cpus: int) -> dict[str, str]:
    """Return the environment variables of a rank."""
    variables = dict(os.environ)
    for name in THREADS:
        variables[name] = str(cpus)
    variables["PYTHONUNBUFFERED"] = "1"
    for name in ("SPARK_ENV_LOADED", "PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_PORT"):
        variables.pop(name, None)
    variables.update(env)
    return variables
