"""Fork servers that have their framework already: each import of torch costs 2 s.

A process of its own, one for each framework and environment, imports the framework once, as a fork server does, and
what the test's marker `imports` names, which its ranks would import themselves. Each fork server is then forked from
it, as a child of the test process, in place of a new Python that imports it again. All else is the product's: the
server, its forks, and all that a rank does. Tests of how ranks start don't use it.

Supervisors, of the test process and in Spark's Python workers, ask for one by a socket (lean/from_warm.py). Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import leaks
from from_warm import SOCKET, Starter
from tritium import frameworks, ship
from tritium.gang.rank import fork_server
from tritium.gang.rank.main import answer_with_stacks, import_all
from tritium.gang.rank.progress_page import ProgressWriter
from tritium.gang.supervisor import forked
from tritium.gang.supervisor.process import start_python

MOST = 5  # processes at the same time; one with torch takes 200 MB
# Variables, and their beginnings, that change from test to test or from worker to worker, and that no import looks at.
_OF_NO_CONSEQUENCE = ("PYTEST_", "SPARK_", "PYSPARK_", "PYTHON_WORKER", "LOCAL_DIRS", "TMPDIR", "PWD", "OLDPWD", "_")
_FILES = ("fsspec",)  # what ranks with a run directory import
_TRAINING = {  # framework -> what ranks import besides: 0.3 s for the training of its estimator, 4 for transformers'
    "huggingface": ["transformers.trainer"],
    "torch": ["tritium.ml.torch.loop"],
    **{name: [f"tritium.ml.{name}.training"] for name in ("keras", "lightgbm", "lightning")},
}
_CLONE_PARENT = 0x8000  # <linux/sched.h>: the child is one of this process's parent
_PIECE = 1 << 20
_FDS = 250
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
    """Starts fork servers as `start_python` does, but from processes that have imported their framework.

    For each supervisor that asks the socket whose name is in `os.environ[SOCKET]`.
    """

    def __init__(self) -> None:
        self._processes: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}  # the last used comes last
        self._lock = threading.Lock()
        self._used = False
        self._imports: Sequence[str] = ()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{os.environ[SOCKET]}")
        self._listener.listen()
        threading.Thread(target=self._listen, name="warm", daemon=True).start()

    @contextmanager
    def used(self, imports: Sequence[str]) -> Iterator[None]:
        """Start the fork servers so, within the block. `imports`: modules that they have beside the framework."""
        with mock.patch.object(forked, "start_python", Starter(start_python)):
            self._used, self._imports = True, imports
            try:
                yield
            finally:
                self._used, self._imports = False, ()

    def _fork(self, request: dict[str, Any], fds: Sequence[int]) -> int | None:
        """Return the pid of a new fork server; None where the product's own has to start it."""
        settings = json.loads(request["argument"])["settings"]
        if settings["framework"] is None and not self._imports:
            return None  # the tests that look for a rank's executor among its parents have no framework
        training = _TRAINING.get((settings["framework"] or {}).get("name"), ())
        with self._lock:
            settings["imports"] = [*_FILES, *training, *self._imports]
            key = _key(request["environment"], settings)
            connection = self._connection(key, request["environment"], settings)
            socket.send_fds(connection, [json.dumps(request).encode()], fds)
            try:
                answer = connection.recv(_PIECE)
            except ConnectionResetError:  # it has ended before it read the request
                answer = b""
            if not answer:  # it could not import the framework: the product's own says so to the test
                self._end(key)
                return None
        return int(answer)

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="warm", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """Start a fork server for a supervisor, and tell it how the server ends."""
        with connection, suppress(ConnectionError):
            data, fds, _, _ = socket.recv_fds(connection, _PIECE, _FDS)
            request = json.loads(data)
            argument = {**json.loads(request["argument"]), "parent": os.getpid()}
            try:
                pid = self._fork({**request, "argument": json.dumps(argument)}, fds) if self._used else None
            finally:
                for fd in fds:
                    os.close(fd)
            connection.sendall(json.dumps(pid).encode())
            if pid is not None:
                _, status = os.waitpid(pid, 0)
                connection.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())

    def _connection(self, key: str, environment: Mapping[str, str], settings: Mapping[str, Any]) -> socket.socket:
        if key in self._processes:
            self._processes[key] = self._processes.pop(key)
            return self._processes[key][1]
        while len(self._processes) >= MOST:
            self._end(next(iter(self._processes)))
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
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for key in list(self._processes):
            self._end(key)


def _key(environment: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """Return what an import depends on."""
    found = {key: value for key, value in environment.items() if not key.startswith(_OF_NO_CONSEQUENCE)}
    framework = {key: value for key, value in (settings["framework"] or {}).items() if key != "ps"}
    # What a session ships is added by each fork, and roles come with the launch.
    path = [entry for entry in settings["path"] if "/spark-" not in entry and "work/app-" not in entry]
    return json.dumps([found, framework, settings["aliases"], settings["imports"], path])


def serve(argument: str) -> None:
    """Import what is needed, and start a fork server for each request, until the test process closes the connection."""
    given = json.loads(argument)
    settings, connection = given["settings"], socket.socket(fileno=given["socket"])
    before = dict(os.environ)
    with fork_server.looking_by_nvml():
        import_all(settings, frameworks.from_json(settings["framework"]), ProgressWriter())
    set_by_import = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(connection, _PIECE, _FDS)
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
    os.environ.clear()  # of whom it was started for
    os.environ.update({**request["environment"], **set_by_import})
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
    ship.import_from(settings["path"])
    return True
