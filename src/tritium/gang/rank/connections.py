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

_UNSPECIFIED = bytes(128)  # The family AF_UNSPEC is 0.


def connections() -> Iterator[tuple[Ends, int]]:
    """Yield this process's TCP connections, and their descriptors, without those of Python's own sockets.

    Libraries open their connections in C; those in Python are the user's own, or Tritium's.
    """
    # The connections of multiprocessing are known, too, as they take over the descriptor of a socket.
    kinds = socket.socket, getattr(sys.modules.get("multiprocessing.connection"), "Connection", socket.socket)
    pythons = {_descriptor(object_) for object_ in gc.get_objects() if issubclass(type(object_), kinds)}
    for name in os.listdir("/dev/fd"):
        if int(name) in pythons:
            continue
        with suppress(OSError), socket_at(int(name)) as connection:  # An OSError: it is no socket.
            kind = connection.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
            if connection.family in (socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM:
                yield (_end(connection.getsockname()), _end(connection.getpeername())), int(name)


def reset(theirs: Iterable[Ends], but: Iterable[int]) -> None:
    """Reset this process's connections whose other ends are among `theirs`, but none with a port of `but` at an end.

    Whoever waits for a message at the other end then fails at once, also in libraries that take a closed connection for
    a pause, as LightGBM does.
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
    except OSError:  # It is closed.
        return -1


def _end(address: tuple[str, int]) -> str:
    return f"{address[0].removeprefix('::ffff:')} {address[1]}"
