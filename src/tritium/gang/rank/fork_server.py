"""The process that imports the framework once, and forks every rank of its executor (rank).

It has one thread, and imports before it forks; nothing else runs in it. Supervisors connect to its socket: each asks
for one rank, and passes the rank's descriptors along. A rank ends with this process, and is killed when the connection
of its supervisor ends. When the last rank has ended, so does this process.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

from tritium import frameworks
from tritium.gang.rank.main import answer_with_stacks, die_with, import_all, run
from tritium.gang.rank.process_group import end_group, kill_group
from tritium.gang.rank.progress_page import ProgressWriter
from tritium.wire import WAITING, peer

ROOM = 512
"""Descriptors below it are a rank's: it has them under the same numbers as its supervisor."""
REAP = b"reap\n"
"""The supervisor has seen that its rank has ended, and signals it no more."""
_FDS_AT_ONCE = 250  # The kernel passes up to 253 with a message.
_PIECE = 1 << 16
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def main(argument: str) -> None:
    """Run the server. `argument` is JSON: the `settings` of the first rank, and the `listener`. Does not return."""
    order = json.loads(argument)
    settings = order["settings"]
    listener = socket.socket(fileno=os.dup(order["listener"]))
    listener.listen(WAITING)  # Called again, as supervisors take the last process that called it for the server.
    die_with(order["parent"])  # Until the import has ended, as nobody could end one that hangs.
    imported = _import(settings)
    die_with(None)
    gc.collect()
    gc.freeze()  # A collection in a rank would write to, and so copy, every page that it shares with others.
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(1, ROOM):  # The first rank's were inherited, and must not stay open here.
        os.dup2(null, number, inheritable=number < 3)
    _Server(listener, imported).serve()
    os._exit(0)


def _import(settings: dict[str, Any]) -> BaseException | Literal[True]:
    """Import what the ranks need. Returns True, or the error, which each of them reports."""
    answer_with_stacks(settings)
    try:
        with looking_by_nvml():
            import_all(settings, frameworks.from_json(settings["framework"]), ProgressWriter.on(settings["progress"]))
    except BaseException as error:  # noqa: BLE001 - any module's code runs here, and may call sys.exit
        return error
    return True


@contextmanager
def looking_by_nvml() -> Iterator[None]:
    """Let torch look for GPUs in a way that is safe before a fork.

    Not in the ranks: torch's optimizers look at every step, which takes 2 µs, and 40 to 200 this way.
    """
    if _BY_NVML in os.environ:
        yield
        return
    os.environ[_BY_NVML] = "1"
    try:
        yield
    finally:
        os.environ.pop(_BY_NVML, None)


class _Rank:
    """A supervisor's connection, and the rank that it has asked for."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.asked = b""
        self.fds: list[int] = []
        self.pid: int | None = None
        self.ended = False
        self.orphaned = False

    def tell(self, **fields: Any) -> None:
        with suppress(OSError):  # If the supervisor is gone, the next read of its connection shows it.
            self.connection.sendall(json.dumps(fields).encode() + b"\n")

    def kill(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)  # It may not lead its group yet.
            kill_group(self.pid)

    def close(self) -> None:
        self.connection.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class _Server:
    def __init__(self, listener: socket.socket, imported: BaseException | Literal[True]) -> None:
        self._listener = listener
        self._imported = imported
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._ended, wake = socket.socketpair()
        for end in (listener, self._ended, wake):
            end.setblocking(False)
        for end in (listener, self._ended):
            self._selector.register(end, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._wake = wake

    def serve(self) -> None:
        """Serve until no supervisor is connected any more, and every rank has ended."""
        while True:
            if not self._ranks:
                self._accept()  # A supervisor may have connected just now, or during the import.
            if not self._ranks:
                return
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._ended:
                    self._ended.recv(_PIECE)
                    self._find_ended()
                else:
                    self._read(key.data)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            if peer(connection)[1] != os.getuid():  # The socket's name has no owner and no mode.
                connection.close()
                continue
            rank = _Rank(connection)
            self._ranks.append(rank)
            self._selector.register(connection, selectors.EVENT_READ, rank)

    def _read(self, rank: _Rank) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(rank.connection, _PIECE, _FDS_AT_ONCE)
        except OSError:
            data, fds = b"", []
        rank.fds += fds
        if not data:
            self._drop(rank)
        elif rank.pid is None:
            rank.asked += data
            if rank.asked.endswith(b"\n"):
                self._fork(rank)
        elif rank.ended:
            assert data == REAP
            self._reap(rank)

    def _fork(self, rank: _Rank) -> None:
        server = os.getpid()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of threads; those of BLAS allow a fork.
                pid = os.fork()
        except OSError as error:  # There is no memory, or there are too many processes.
            output = rank.fds[1]
            with suppress(OSError):
                os.write(output, f"tritium: this rank can't be forked: {error}\n".encode())
            rank.tell(status=1 << 8, peak=None)
            return
        if pid:
            rank.pid = pid
            for fd in rank.fds:
                os.close(fd)
            rank.fds = []
            return
        try:
            self._become(rank, server)
        except BaseException:  # noqa: BLE001 - this process must not continue as a second server
            traceback.print_exc()
        finally:
            os._exit(1)

    def _become(self, this_rank: _Rank, server: int) -> None:
        """Run a rank in this process, which was just forked. Does not return."""
        os.setsid()
        die_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        order = json.loads(this_rank.asked)
        for fd, number in zip(this_rank.fds, order["fds"], strict=True):
            os.dup2(fd, number)
        kept = {*order["fds"]}
        for number in range(3, ROOM):
            if number not in kept:
                with suppress(OSError):
                    os.close(number)
        this_rank.tell(pid=os.getpid())
        self._selector.close()
        for socket_ in (self._listener, self._ended, self._wake):
            socket_.close()
        for rank in self._ranks:
            rank.close()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:  # Else all ranks draw the same numbers; Python seeds its own generator itself.
            numpy.random.seed()
        run(order["settings"], self._imported)

    def _find_ended(self) -> None:
        for rank in [rank for rank in self._ranks if rank.pid is not None and not rank.ended]:
            assert rank.pid is not None
            if os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                rank.ended = True
                rank.tell(ended=rank.pid)
                if rank.orphaned:
                    self._reap(rank)

    def _drop(self, rank: _Rank) -> None:
        """Kill the rank of a supervisor that is gone."""
        self._selector.unregister(rank.connection)
        rank.orphaned = True
        if rank.pid is None:
            rank.close()
            self._ranks.remove(rank)
            return
        rank.kill()
        if rank.ended:
            self._reap(rank)

    def _reap(self, rank: _Rank) -> None:
        assert rank.pid is not None
        end_group(rank.pid)  # Ends its children. Its pid is not reused before it is reaped below.
        _, status, usage = os.wait4(rank.pid, 0)
        rank.tell(status=status, peak=usage.ru_maxrss * 1024)
        if not rank.orphaned:
            self._selector.unregister(rank.connection)
        rank.close()
        self._ranks.remove(rank)
