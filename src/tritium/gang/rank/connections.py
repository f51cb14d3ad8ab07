"""The TCP connections of a rank's process: list them, and reset those to other ranks (rank)."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from tritium.wire import socket_at

Ends = tuple[str, str]
"""Both ends of a connection, this process's first, each as "address port"."""

_UNSPECIFIED = bytes(128)  # a socket address of the family AF_UNSPEC, which is 0


def connections() -> Iterator[tuple[Ends, int]]:
    """Yield this process's TCP connections, and their descriptors, without those of Python's own sockets.

    Libraries make theirs in C; a connection in Python is the user's own, or of Tritium.
    """
    # multiprocessing's connections and managers take the descriptor of a socket over.
    kinds = socket.socket, getattr(sys.modules.get("multiprocessing.connection"), "Connection", socket.socket)
    pythons = {_descriptor(each) for each in gc.get_objects() if issubclass(type(each), kinds)}
    for name in os.listdir("/dev/fd"):
        if int(name) in pythons:
            continue
        with suppress(OSError), socket_at(int(name)) as found:  # else it is no socket
            kind = found.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
            if found.family in (socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM:
                yield (_end(found.getsockname()), _end(found.getpeername())), int(name)


def reset(theirs: Iterable[Ends], but: Iterable[int]) -> None:
    """Reset the connections of this process whose other ends are among `theirs`, unless a port of `but` is an end's.

    Who waits at the other end for a message is told at once that none will come, also by libraries that take the mere
    end of a connection for a pause, as LightGBM does.
    """
    known = {(second, first) for first, second in theirs}
    kept = {str(port) for port in but}
    for ends, descriptor in connections():
        if ends in known and kept.isdisjoint(end.rpartition(" ")[2] for end in ends):
            # To connect with nobody resets a connection (Linux), and leaves the library its descriptor.
            ctypes.CDLL(None).connect(descriptor, _UNSPECIFIED, len(_UNSPECIFIED))


def _descriptor(connection: Any) -> int:
    try:
        return int(connection.fileno())
    except OSError:  # it is closed
        return -1


def _end(address: tuple[str, int]) -> str:
    return f"{address[0].removeprefix('::ffff:')} {address[1]}"
