"""Which connections of a process are a library's, and what a rank that waits at the other end of one sees."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener

import pytest

from tritium.gang.rank.connections import connections, reset

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there are processes known to be idle")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, int]]:
    """Yield both ends of a connection; the second is a library's, of which Python has no object."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as first:
        first.settimeout(10.0)
        accepted, _ = server.accept()
        second = accepted.detach()
        yield first, second
        os.close(second)


def address(name: tuple[str, int]) -> str:
    return f"{name[0]} {name[1]}"


def test_those_of_pythons_own_sockets_are_not_listed(pair: tuple[socket.socket, int]) -> None:
    first, second = pair
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(("127.0.0.1", 0)))
        ours = stack.enter_context(Client(listener.address))
        theirs = stack.enter_context(listener.accept())
        closed = Client(listener.address)
        closed.close()
        listed = {number: ends for ends, number in connections()}
        assert listed[second] == (address(first.getpeername()), address(first.getsockname()))
        assert not {first.fileno(), ours.fileno(), theirs.fileno()} & set(listed)


def test_only_those_to_a_rank_that_waits_are_reset(pair: tuple[socket.socket, int]) -> None:
    first, _ = pair
    ends = address(first.getsockname()), address(first.getpeername())
    reset([("127.0.0.1 1", ends[1]), (ends[1], ends[0])], but=[])  # another's
    reset([ends], but=[first.getpeername()[1]])  # of a port at which this process serves
    first.setblocking(False)
    with pytest.raises(BlockingIOError):
        first.recv(1)
    reset([ends], but=[])
    first.setblocking(True)
    with pytest.raises(ConnectionResetError):
        first.recv(1)
