"""The check of what a test leaves behind: `Trace.now()` is taken before it, and `left()` lists what is new after it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SECONDS = 6.0  # Spark ends the other tasks of a failed gang after 3.8 s at the latest
SPARK_FILES = ("spark-", "blockmgr-", "pyspark-", "hsperfdata_", "liblz4", "libzstd", "snappy-", "libnetty")
OTHER_FILES = (
    "pytest-of-",
    "artifacts",
    "tritium-tests-",
    "torchinductor_",
    "__autograph_generated_file",
    "__pycache__",
)
# TensorFlow sets the second row when it is imported, and Keras imports it when it first saves or loads a model.
ENVIRONMENT_OF_OTHERS = (
    *("PYTEST_", "SPARK_", "PYSPARK_", "COLUMNS", "LINES", "TORCHINDUCTOR_"),
    *("ENABLE_RUNTIME_UPTIME_TELEMETRY", "HDF5_PLUGIN_PATH", "TF2_BEHAVIOR", "TPU_ML_PLATFORM"),
)
STRANGERS: set[int] = set()  # processes that a test checks itself, with all their children
PYSPARK_THREADS = ("py4j", "pyspark", "grpc")
_mmaps = 0  # calls of mmap.mmap in this process


def _count(event: str, args: Any) -> None:
    global _mmaps
    if event == "mmap.__new__":
        _mmaps += 1


sys.addaudithook(_count)


@dataclass(frozen=True)
class Trace:
    """The state of this process and of the machine, as far as this process made it."""

    processes: dict[int, str]
    threads: dict[int, str]
    sockets: dict[str, str]
    files: frozenset[str]
    held: frozenset[str]
    mapped: frozenset[str]
    mmaps: int
    environment: dict[str, str]
    path: tuple[str, ...]
    cwd: str
    handlers: dict[str, Any]

    @classmethod
    def now(cls, strangers: set[int], before: Trace | None = None) -> Trace:
        """Return the current state without `strangers`: pids to ignore with all their children.

        before : an earlier state. What is mapped is taken from it where Python has mapped nothing since: with torch the
                 kernel lists 1,600 mappings, which takes 4 ms.
        """
        known = before is not None and before.mmaps == _mmaps
        return cls(
            processes=_processes(strangers),
            threads=_threads(),
            sockets=_sockets(),
            files=frozenset(_files()),
            held=frozenset(_held()),
            mapped=before.mapped if before is not None and known else frozenset(_mapped()),
            mmaps=_mmaps,
            environment=_environment(),
            path=tuple(sys.path),
            cwd=os.getcwd(),
            handlers={name: signal.getsignal(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGCHLD")},
        )

    def left(self, strangers: set[int]) -> list[str]:
        """Wait up to SECONDS until nothing is left. Returns what is left then, a clause each."""
        return self.left_and_now(strangers)[0]

    def left_and_now(self, strangers: set[int], *, whole: bool = True) -> tuple[list[str], Trace]:
        """Return what `left` does, and the state then.

        whole : look also for what a library has mapped itself, without Python's mmap.
        """
        deadline = time.monotonic() + SECONDS
        generation = 1  # what the test made is mostly there; a full collection takes 0.2 s after Keras
        while found := self._compare(now := Trace.now(strangers, None if whole else self)):
            if time.monotonic() > deadline:
                break
            if gc.collect(generation) == 0 or generation == 2:
                time.sleep(0.05)
            generation = 2
        return found, now

    def _compare(self, now: Trace) -> list[str]:
        found = [f"process {pid}: {text}" for pid, text in now.processes.items() if pid not in self.processes]
        found += [f"thread {text}" for key, text in now.threads.items() if key not in self.threads]
        found += [f"socket {text}" for key, text in now.sockets.items() if key not in self.sockets]
        found += [f"file {name}" for name in sorted(now.files - self.files)]
        held, earlier = now.held | now.mapped, self.held | self.mapped
        found += [f"deleted file held open or mapped: {name}" for name in sorted(held - earlier)]
        for name in sorted(self.environment.keys() | now.environment.keys()):
            before, after = self.environment.get(name), now.environment.get(name)
            if before != after:
                found.append(f"environment variable {name}: {before!r} became {after!r}")
        if self.path != now.path:
            found.append(f"sys.path: {set(now.path) ^ set(self.path) or 'another order'}")
        if self.cwd != now.cwd:
            found.append(f"working directory: {self.cwd} became {now.cwd}")
        for name, handler in self.handlers.items():
            if handler is not now.handlers[name]:
                found.append(f"handler of {name}: {handler} became {now.handlers[name]}")
        if (distributed := sys.modules.get("torch.distributed")) and distributed.is_available():
            found += ["torch.distributed's process group"] if distributed.is_initialized() else []
        return found


def _processes(strangers: set[int]) -> dict[int, str]:
    me = psutil.Process()
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, str] = {}
    queue = [(pid, 0) for pid in children.get(me.pid, ())]
    queue += [(pid, 0) for pid in children.get(1, ()) if _is_orphan_of(me, pid)]
    while queue:
        pid, depth = queue.pop()
        if pid in strangers:
            continue
        command = _command(pid)
        workers = depth + 1 if "pyspark.daemon" in command else 0
        # The JVM, its Python daemon and the daemon's workers are Spark's; children of a worker are a rank's.
        if command and not (0 < workers <= 2 or _is_spark(command)):
            found[pid] = command[:300]
        queue += [(child, workers) for child in children.get(pid, ())]
    return found


def _parents() -> dict[int, int]:
    """Return pid → parent's pid of every process. It is called twice a test: psutil takes five times as long."""
    if sys.platform != "linux":
        return {p.pid: p.info["ppid"] for p in psutil.process_iter(["ppid"])}
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may have ended
            file = os.open(f"/proc/{name}/stat", os.O_RDONLY)  # half the time of open()
            try:
                stat = os.read(file, 4096)
            finally:
                os.close(file)
            found[int(name)] = int(stat[stat.rindex(b")") + 4 :].split(b" ", 1)[0])
    return found


def _is_spark(command: str) -> bool:
    return "org.apache.spark" in command or "pyspark/bin/" in command or "pyspark.worker" in command


def _is_orphan_of(me: psutil.Process, pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() > me.create_time() and process.environ().get("TRITIUM_TEST") == str(me.pid)
    except psutil.Error:
        return False


def _command(pid: int) -> str:
    """Return the command line, or the name where there is none yet, as while the process begins a program.

    Empty where the process has ended or is a zombie of another parent.
    """
    try:
        process = psutil.Process(pid)
        zombie = process.status() == psutil.STATUS_ZOMBIE
        if zombie:
            return "zombie (never waited for)" if process.ppid() == os.getpid() else ""
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def _threads() -> dict[int, str]:
    found = {}
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None)
        owner = f"{type(thread).__module__}|{getattr(target, '__module__', '')}"
        if thread.is_alive() and not any(name in owner for name in PYSPARK_THREADS):
            found[id(thread)] = f"{thread.name} ({target or type(thread).__name__})"
    return found


def _sockets() -> dict[str, str]:
    """Return this process's sockets that listen, or are bound without a connection (ports held for a framework)."""
    found = {}
    folder = Path("/proc/self/fd")
    for entry in folder.iterdir() if folder.exists() else ():
        try:
            target = os.readlink(entry)
            if not target.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                address = copy.getsockname()
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[target] = f"listening on {address}"
                elif address[1] and not _is_connected(copy):
                    found[target] = f"bound to {address}"
        except OSError:
            continue  # closed meanwhile
    return found


def _is_connected(peer: socket.socket) -> bool:
    """Return whether `peer` is or was connected: a connection that its other end has reset (Py4J's) holds no port."""
    info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 144)  # struct tcp_info
    closed, sent = info[0] == 7, int.from_bytes(info[136:140], sys.byteorder)  # tcpi_state, tcpi_segs_out
    return not closed or sent > 0


def _files() -> set[str]:
    folders = {tempfile.gettempdir(), os.getcwd(), *os.environ.get("SPARK_LOCAL_DIRS", "").split(",")}
    return {
        entry.path
        for folder in folders
        if folder and os.path.isdir(folder)
        for entry in os.scandir(folder)
        if not entry.name.startswith(SPARK_FILES + OTHER_FILES)
    }


def _held() -> set[str]:
    """Return deleted files in scratch directories that this process holds open, such as a spool not closed."""
    places = _scratch()
    found = set()
    folder = Path("/proc/self/fd")
    for entry in folder.iterdir() if folder.exists() else ():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # closed meanwhile
        if target.endswith("(deleted)") and target.startswith(places):
            found.add(f"{target} as {entry.name}")
    return found


def _mapped() -> set[str]:
    """Return deleted files in scratch directories that this process has mapped."""
    places = _scratch()
    maps = Path("/proc/self/maps")
    lines = maps.read_bytes() if maps.exists() else b""
    deleted = (line for line in lines.splitlines() if line.endswith(b"(deleted)"))  # few of 1600 with torch
    names = (os.fsdecode(line).split(maxsplit=5)[5] for line in deleted)
    return {name for name in names if name.startswith(places)}


def _scratch() -> tuple[str, ...]:
    return tuple({tempfile.gettempdir(), *os.environ.get("SPARK_LOCAL_DIRS", "").split(",")} - {""})


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_OF_OTHERS)}
