"""What `tritium doctor` asks of each executor (Spark's Python worker).

Spark's Python worker gets this module by value: it may import only Python's own modules and pyspark, as Tritium is not
there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

CONNECT_SECONDS = 3.0
PEERS = 16
"""How many other executors each connects to: in a ring, so that every one is reached from others."""
_GPUS = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


def in_rdd(question: dict[str, Any], rows: Iterable[Any]) -> Iterator[str]:
    """Answer from a partition of an RDD."""
    yield json.dumps(look(question))


def in_arrow(question: dict[str, Any], batches: Iterable[Any]) -> Iterator[Any]:
    """Answer from `mapInArrow`, as a row with the column `facts`."""
    import pyarrow

    for _ in batches:  # Spark waits until all rows are read.
        pass
    yield pyarrow.RecordBatch.from_pydict({"facts": [json.dumps(look(question))]})


def look(question: dict[str, Any]) -> dict[str, Any]:
    """Return what this task's executor has.

    question : `driver`: [host, port] of a socket that answers each byte with the driver's time, or None; `libraries`:
    names of modules; `file`: the path of a file that the driver has written, or None; `barrier`: whether the tasks run
    at once.

    The first task of each executor looks at all of it, the others at what tasks differ in.
    """
    from pyspark import BarrierTaskContext, TaskContext

    context: Any = BarrierTaskContext.get() if question["barrier"] else TaskContext.get()
    index = context.partitionId()
    addresses = [task.address for task in context.getTaskInfos()] if question["barrier"] else [socket.gethostname()]
    executor = addresses[index] if question["barrier"] else addresses[0]
    first = not question["barrier"] or addresses.index(executor) == index
    facts: dict[str, Any] = {
        "executor": executor,
        "first": first,
        "resources": {name: list(r.addresses) for name, r in context.resources().items()},
    }
    if question["barrier"]:
        facts["peers"] = _peers(context, addresses) if len(set(addresses)) > 1 else {}
    if first:
        facts |= _machine(question)
    return facts


def _machine(question: dict[str, Any]) -> dict[str, Any]:
    return {
        "python": [sys.version.split()[0], sys.executable],
        "java": _java(),
        "libraries": {name: _library(name) for name in question["libraries"]},
        "cuda": _cuda(),
        "gpus": _gpus(),
        "shm": _space("/dev/shm"),
        "dirs": {place: _space(place) for place in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if place},
        "memory": _memory(),
        "driver": _driver(*question["driver"]) if question["driver"] else None,
        "file": os.path.exists(question["file"]) if question["file"] else None,
    }


def _java() -> str | None:
    """Return the version of the JVM among this process's ancestors, which is the executor; None: not known."""
    pid = os.getpid()
    with contextlib.suppress(OSError, ValueError, StopIteration):  # Only Linux has /proc, and some JVMs no such file.
        while pid > 1:
            program = os.path.realpath(f"/proc/{pid}/exe")
            if os.path.basename(program) == "java":
                with open(os.path.join(os.path.dirname(program), "..", "release"), errors="replace") as release:
                    line = next(line for line in release if line.startswith("JAVA_VERSION="))
                return line.partition("=")[2].strip().strip('"')
            with open(f"/proc/{pid}/stat", errors="replace") as status:
                pid = int(status.read().rpartition(")")[2].split()[1])
    return None


def _library(name: str) -> dict[str, str | None]:
    """Return the version that is installed, and what an import raises; None: nothing."""
    version = error = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(name)
    try:
        module = importlib.import_module(name)
        version = version or str(getattr(module, "__version__", "?"))
    except BaseException as problem:  # noqa: BLE001 - whatever the code of a library raises is what it is asked for
        error = f"{type(problem).__name__}: {problem}"
    return {"version": version, "error": error}


def _cuda() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {"built": torch.version.cuda, "available": torch.cuda.is_available(), "devices": torch.cuda.device_count()}


def _gpus() -> list[str]:
    """Return the name, driver and memory of each GPU of the machine."""
    try:
        answer = subprocess.run(_GPUS, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.strip().splitlines()


def _space(place: str) -> dict[str, Any] | None:
    """Return the size and the free bytes of a directory, its file system, and whether it can be written."""
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    writable = os.access(place, os.W_OK)
    return {"total": usage.total, "free": usage.free, "kind": _file_system(place), "writable": writable}


def _file_system(place: str) -> str:
    """Return the type of the file system, such as "ext4" or "tmpfs"; "?" where the system doesn't say."""
    here, longest, kind = os.path.realpath(place), -1, "?"
    with contextlib.suppress(OSError), open("/proc/mounts", errors="replace") as mounts:
        for line in mounts:
            _, point, name = line.split()[:3]
            if os.path.commonpath([here, point]) == point and len(point) >= longest:
                longest, kind = len(point), name
    return kind


def _memory() -> dict[str, int | None]:
    """Return the limits in bytes (None: there is none) of this process's cgroup and address space."""
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    limits = [limit for limit in map(_number, _limit_files()) if limit is not None and limit < 1 << 60]
    return {
        "cgroup": min(limits, default=None),
        "address_space": None if address_space == resource.RLIM_INFINITY else address_space,
        "machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _limit_files() -> Iterator[str]:
    """Yield the files with the memory limits of this process: cgroup v2 and v1, and the groups around its own."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup", errors="replace") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root, name = ("", "memory.max") if not controllers else ("/memory", "memory.limit_in_bytes")
            parts = [part for part in path.split("/") if part and part != ".."]
            for count in range(len(parts) + 1):
                yield "/".join(["/sys/fs/cgroup" + root, *parts[:count], name])


def _number(file: str) -> int | None:
    try:
        with open(file) as content:
            return int(content.read())
    except (OSError, ValueError):  # "max", or a path of the host's that is not to be seen in a container.
        return None


def _driver(host: str, port: int) -> dict[str, Any]:
    """Connect to the driver, and return its clock's offset in seconds, and the error by which that is known at best."""
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            asked = time.time()
            connection.sendall(b"?")
            answer = connection.makefile("rb").readline()
            heard = time.time()
        return {"offset": float(answer) - (asked + heard) / 2, "within": (heard - asked) / 2}
    except (OSError, ValueError) as error:
        return {"error": str(error)}


def _peers(context: Any, addresses: Sequence[str]) -> dict[str, str | None]:
    """Connect to the next executors of the ring; return executor → what went wrong, None: nothing."""
    index = context.partitionId()
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        ports = context.allGather(str(listener.getsockname()[1]))
        tried: dict[str, str | None] = {}
        if addresses.index(addresses[index]) == index:
            ring = list(dict.fromkeys([*addresses[index:], *addresses[:index]]))[1 : PEERS + 1]
            for other in ring:
                host = other.rpartition(":")[0].strip("[]")
                tried[other] = _refused(host, int(ports[addresses.index(other)]))
        context.barrier()  # The others may still connect to this one.
    return tried


def _refused(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        return f"port {port}: {error}"
    return None
