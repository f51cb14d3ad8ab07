"""Have the fork server of an executor fork a rank, and start the server where there is none (supervisor)."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from tritium.gang.rank.fork_server import REAP, ROOM
from tritium.gang.rank.process_group import end_group, kill_group
from tritium.gang.supervisor.process import RankProcess, environment, lift_memory_limit, spawn_rank, start_python
from tritium.gang.supervisor.stacks import SIGNAL
from tritium.wire import peer, reach

if TYPE_CHECKING:
    from tritium.gang.order import Order

_MOST_DESCRIPTORS = 100  # A user may have only so many on the way between two processes.
_ANSWER_SECONDS = 5.0
"""The limit for the server to report the end of a rank that was killed."""
_TELL_SECONDS = 2.0
"""The limit for the supervisor that started the server to report that the server has ended."""

# Every low number is taken before the first import, so that no library opens descriptors where a rank needs its own.
_BOOT = """
import os, sys
home, argument, room, *kept = sys.argv[1:]
null = os.open(os.devnull, os.O_RDWR)
for number in set(range(3, int(room))) - {null, *map(int, kept)}:
    os.dup2(null, number, False)  # False: not inheritable.
if not os.path.isdir(home):
    sys.path.insert(0, f"/proc/{os.getpid()}/fd/{os.open(home, os.O_RDONLY)}")
else:
    sys.path.append(home)
from tritium.gang.rank.fork_server import main
main(argument)
"""


def start_rank(
    settings: Mapping[str, Any], *, order: Order, daemon: int | None, keep: Sequence[int], cpus: int
) -> RankProcess:
    """Start a rank: forked where the system allows it, else in a Python of its own.

    daemon : the parent of this executor's Python workers; None: this process supervises all ranks.
    keep   : the file descriptors that it inherits, under the same numbers.
    cpus   : number of threads of OpenMP and the like.

    The calling thread must outlive the rank: the kernel kills the child with it. Raises BadSetting as
    `lift_memory_limit` does.
    """
    options: dict[str, Any] = {"keep": keep, "env": order.env, "cpus": cpus}
    if _may_fork(order, keep):
        within = os.readlink("/proc/self/ns/pid")  # Containers may share a network, and with it such names.
        rank = fork_rank(f"\0tritium-{order.launch}-{within}-{daemon or os.getpid()}", settings, **options)
        if rank is not None:
            return rank
    return spawn_rank(settings, **options)


def _may_fork(order: Order, keep: Sequence[int]) -> bool:
    if sys.platform != "linux":
        return False
    if order.accelerators:  # A library that looks for GPUs at its import may leave CUDA unusable in a forked process.
        return False
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        len(keep) <= _MOST_DESCRIPTORS and max(keep) < ROOM and (limit == resource.RLIM_INFINITY or limit >= 2 * ROOM)
    )


class ForkedRank(RankProcess):
    """A rank that the fork server of its executor forks as soon as that has imported the framework."""

    def __init__(self, connection: socket.socket, server: subprocess.Popen[bytes] | None, *pipes: IO[bytes]) -> None:
        super().__init__(*pipes)
        self._connection = connection
        self._server = server
        self._server_pid = peer(connection)[0] if server is None else server.pid
        self._pid: int | None = None
        self._early_signals: list[int] = []
        self._killed = threading.Event()
        self._reaper = threading.Thread(target=server.wait, name="tritium-fork-server", daemon=True) if server else None
        if self._reaper is not None:
            self._reaper.start()

    @property
    def pid(self) -> int:
        """The rank's; before the fork the server's."""
        return self._pid or self._server_pid

    def wait(self) -> int:
        """Do as `RankProcess.wait`. Where the server is killed, so is the rank."""
        for report in self._reports():
            if "pid" in report:
                self._on_fork(report["pid"])
            elif "ended" in report:
                self._pid = self._pid or int(report["ended"])
                self._killed.set()
                end_group(self._pid)
                with self._lock, suppress(OSError):  # The server may have been killed just now.
                    self._ended = True
                    self._connection.sendall(REAP)
            else:
                self.peak = report["peak"]
                return os.waitstatus_to_exitcode(report["status"])
        if self._pid is None and not self._killed.is_set():
            return self._code_of_server()
        self.kill_group()
        if self._pid is not None:
            end_group(self._pid)  # Only children are left: the kernel killed the rank with its parent.
        with self._lock:
            self._ended = True
        return -signal.SIGKILL

    def _reports(self) -> Iterator[dict[str, Any]]:
        rest = b""
        self._connection.settimeout(_ANSWER_SECONDS)
        while True:
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                if not self._killed.is_set():
                    continue
                return  # The server is stopped, and can't report the end of a rank that was killed.
            except OSError:
                data = b""
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def _on_fork(self, pid: int) -> None:
        with self._lock:
            self._pid = pid
            early, self._early_signals = self._early_signals, []
        if self._killed.is_set():
            self.kill_group()
        for number in early:
            self.send_signal(number)

    def _code_of_server(self) -> int:
        """Return how the server has ended while it imported, to the supervisor that has started it.

        Any other waits for that one's report to end the gang.
        """
        if self._server is None:
            self._killed.wait(_TELL_SECONDS)
            return -signal.SIGKILL
        return self._server.wait() or 1

    def send_signal(self, number: int) -> None:
        """Do as `RankProcess.send_signal`. The server itself answers with its stacks while it imports."""
        with self._lock, suppress(ProcessLookupError):
            if self._pid is not None:
                if not self._ended:
                    os.kill(self._pid, number)
            elif number != SIGNAL:
                self._early_signals.append(number)
            elif self._server is not None:
                os.kill(self._server_pid, number)

    def kill_group(self) -> None:
        """Do as `RankProcess.kill_group`; before the fork, prevent it."""
        self._killed.set()
        with self._lock, suppress(OSError):
            if self._pid is None:
                self._connection.shutdown(socket.SHUT_RDWR)
            elif not self._ended:
                kill_group(self._pid)

    def close(self) -> None:
        """Close the pipes and the connection. The server ends with the last one."""
        super().close()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._reaper is not None:
            self._reaper.join(_TELL_SECONDS)  # The server ends later only if other ranks outlive this one.


def fork_rank(
    name: str, settings: Mapping[str, Any], *, keep: Sequence[int], env: Mapping[str, str], cpus: int
) -> ForkedRank | None:
    """Have the fork server `name` fork a rank; start it where there is none. None: its socket can't be had."""
    try:
        connection, listener = reach(name)
    except OSError:  # The system lacks abstract sockets, or forbids them.
        return None
    if listener is None and peer(connection)[1] != os.getuid():
        connection.close()
        return None
    pipes = [os.pipe(), os.pipe()]
    ends = [write for _, write in pipes]
    server = None
    try:
        if listener is not None:
            server = _start_server(listener, settings, keep=keep, ends=ends, environment=environment(env, cpus))
        _ask(connection, settings, [*ends, *keep], [1, 2, *keep])
    except BaseException:
        connection.close()
        for read, _ in pipes:
            os.close(read)
        if server is not None:
            server.kill()
            server.wait()
        raise
    finally:
        for end in ends:
            os.close(end)
        if listener is not None:
            listener.close()
    return ForkedRank(connection, server, *(os.fdopen(read, "rb", buffering=0) for read, _ in pipes))


def _start_server(
    listener: socket.socket,
    settings: Mapping[str, Any],
    *,
    keep: Sequence[int],
    ends: Sequence[int],
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    number = listener.fileno()
    argument = json.dumps({"settings": dict(settings), "listener": number, "parent": os.getpid()})
    server = start_python(
        _BOOT,
        [argument, *map(str, (ROOM, number, *keep))],
        environment=environment,
        stdout=ends[0],
        stderr=ends[1],
        keep=(number, *keep),
    )
    try:
        lift_memory_limit(server.pid)
    except BaseException:
        server.kill()
        server.wait()
        raise
    return server


def _ask(connection: socket.socket, settings: Mapping[str, Any], fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Ask the server for a rank that has these descriptors under these numbers."""
    request = json.dumps({"settings": dict(settings), "fds": list(numbers)}).encode() + b"\n"
    socket.send_fds(connection, [request[:1]], fds)
    connection.sendall(request[1:])
