"""How a supervisor starts its fork server from a process that has the framework already (../warm.py).

In the test process, and in Spark's Python workers, where `install` is called before the supervisor is imported.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SOCKET = "TRITIUM_TEST_WARM"  # the variable that has the name of the test process's socket
_MODULE = "tritium.gang.supervisor.forked"


class Finder(MetaPathFinder, Loader):
    """Loads the module that starts fork servers, and lets it ask the test process first."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(fullname)
        self._own, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: Any) -> None:
        self._own.exec_module(module)
        module.start_python = Starter(module.start_python)


class Starter:
    """`start_python`, from a process that has the framework where the test allows it."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __call__(self, boot: str, arguments: Sequence[str], **how: Any) -> Any:
        request = {
            "argument": arguments[0],
            "cwd": os.getcwd(),
            "environment": dict(how["environment"]),
            "fds": [1, 2, *how["keep"]],
        }
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"\0{os.environ[SOCKET]}")
            socket.send_fds(connection, [json.dumps(request).encode()], [how["stdout"], how["stderr"], *how["keep"]])
            pid = json.loads(connection.recv(1 << 16) or "null")
        except ConnectionError:  # the test process is gone, or in another network namespace
            pid = None
        if pid is None:
            connection.close()
            return self._own(boot, arguments, **how)
        return Started(pid, connection)


class Started:
    """A process that another one has started, with what a fork server's `Popen` is asked for."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self._lock = threading.Lock()
        self._code: int | None = None

    def wait(self) -> int:
        """Return its exit code, or minus the signal's number."""
        with self._lock:
            if self._code is None:
                with self._connection:
                    self._code = int(self._connection.recv(1 << 16) or -signal.SIGKILL)
            return self._code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def install() -> None:
    """Let the supervisors of this process ask the test process first."""
    sys.meta_path.insert(0, Finder())
