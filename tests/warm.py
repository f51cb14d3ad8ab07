"""Fork servers that have their framework already: tests of training start some 200, and each import of torch costs 2 s.

A process of its own, one for each framework and environment, imports the framework once, as a fork server does. Each
fork server is then forked from it, as a child of the test process, in place of a new Python that imports it again. All
else is the product's: the server, its forks, and all that a rank does. Tests of how ranks start don't use it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import leaks
from tritium import frameworks
from tritium.gang.rank import fork_server
from tritium.gang.rank.main import answer_with_stacks, import_all
from tritium.gang.rank.progress_page import ProgressWriter
from tritium.gang.supervisor import forked
from tritium.gang.supervisor.process import start_python

MOST = 3  # processes at the same time; one with torch takes 200 MB
_OF_NO_CONSEQUENCE = ("PYTEST_CURRENT_TEST",)  # to an import
_CLONE_PARENT = 0x8000  # <linux/sched.h>: the child is one of this process's parent
_PIECE = 1 << 20
# As a fork server begins, so that no library has its descriptors where a rank needs its own.
_BOOT = f"""
import os, sys
home, argument, room, *kept = sys.argv[1:]
null = os.open(os.devnull, os.O_RDWR)
for number in set(range(3, int(room))) - {{null, *map(int, kept)}}:
    os.dup2(null, number, False)
sys.path += [home, {str(Path(__file__).parent)!r}]
import warm
warm.serve(argument)
"""


class Warm:
    """Starts fork servers as `start_python` does, but from processes that have imported their framework."""

    def __init__(self) -> None:
        self._processes: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}  # the last used comes last
        self._lock = threading.Lock()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Start the fork servers of this process so, within the block."""
        with mock.patch.object(forked, "start_python", self._start):
            yield

    def _start(self, boot: str, arguments: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        settings = json.loads(arguments[0])["settings"]
        if sys.platform != "linux" or settings["framework"] is None:
            return start_python(boot, arguments, **how)
        environment = {key: value for key, value in how["environment"].items() if key not in _OF_NO_CONSEQUENCE}
        key = json.dumps([environment, {name: settings[name] for name in ("framework", "path", "aliases")}])
        request = {"argument": arguments[0], "cwd": os.getcwd(), "fds": [1, 2, *how["keep"]]}
        with self._lock:
            connection = self._connection(key)
            socket.send_fds(connection, [json.dumps(request).encode()], [how["stdout"], how["stderr"], *how["keep"]])
            try:
                answer = connection.recv(_PIECE)
            except ConnectionResetError:  # it has ended before it read the request
                answer = b""
        if not answer:  # it could not import the framework: the product's own says so to the test
            self._end(key)
            return start_python(boot, arguments, **how)
        return _Started([sys.executable, *arguments], int(answer))

    def _connection(self, key: str) -> socket.socket:
        if key in self._processes:
            self._processes[key] = self._processes.pop(key)
            return self._processes[key][1]
        while len(self._processes) >= MOST:
            self._end(next(iter(self._processes)))
        environment, settings = json.loads(key)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "r+b") as null:
            number = theirs.fileno()
            arguments = [json.dumps({"settings": settings, "socket": number}), str(fork_server.ROOM), str(number)]
            silent = {"stdout": null.fileno(), "stderr": null.fileno()}
            process = start_python(_BOOT, arguments, environment=environment, keep=(number,), **silent)
        leaks.STRANGERS.add(process.pid)
        self._processes[key] = process, ours
        return ours

    def _end(self, key: str) -> None:
        process, connection = self._processes.pop(key)
        connection.close()  # at which it ends
        process.wait()
        leaks.STRANGERS.discard(process.pid)

    def close(self) -> None:
        """End the processes."""
        for key in list(self._processes):
            self._end(key)


class _Started(subprocess.Popen[bytes]):
    """A child of this process that another one has started."""

    def __init__(self, arguments: Sequence[str], pid: int) -> None:
        with mock.patch.object(subprocess.Popen, "_execute_child"):  # all but that
            super().__init__(arguments)
        self.pid = pid
        self._child_created = True


def serve(argument: str) -> None:
    """Import a framework, and start a fork server for each request, until the test process closes the connection."""
    given = json.loads(argument)
    settings, connection = given["settings"], socket.socket(fileno=given["socket"])
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as fork_server.py does
    import_all(settings, frameworks.from_json(settings["framework"]), ProgressWriter())
    gc.collect()
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(connection, _PIECE, 250)
        if not data:
            os._exit(0)
        pid = _fork_a_sibling()
        if not pid:
            break
        for fd in fds:
            os.close(fd)
        connection.sendall(str(pid).encode())
    request = json.loads(data)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, connection.detach(), False)
    for fd, number in zip(fds, request["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.setsid()
    os.chdir(request["cwd"])
    fork_server._import = _imported
    fork_server.main(request["argument"])


def _fork_a_sibling() -> int:
    """Fork a child of this process's parent. Returns its pid; 0 in the child."""
    python = ctypes.PyDLL(None)  # it keeps the lock of the interpreter
    python.PyOS_BeforeFork()
    pid: int = python.syscall(_NUMBER, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


_NUMBER = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)


def _imported(settings: dict[str, Any]) -> bool:
    answer_with_stacks(settings)
    return True
