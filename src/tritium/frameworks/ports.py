"""Ports at which a rank's framework will listen (supervisor and rank)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tritium.frameworks.framework import Place

held: set[int] = set()
"""Ports of all ranks that were held for a framework. A rank serves the others there also when it has returned."""


def reserved_port() -> socket.socket:
    """Return a socket that is bound to a port that is free on all addresses of this host. The caller closes it.

    It never listens, so only a process that sets SO_REUSEADDR, as torch and gRPC do, can bind the port. It is bound on
    all addresses, as those listen on all, and would fail where another process has the port on one of them.
    """
    with suppress(OSError):  # The host may have no IPv6.
        return _bound(socket.AF_INET6, "::")
    return _bound(socket.AF_INET, "0.0.0.0")


def _bound(family: socket.AddressFamily, address: str) -> socket.socket:
    holder = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # The port is for IPv4, too.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
    except OSError:
        holder.close()
        raise
    return holder


@contextmanager
def held_ports(place: Place) -> Iterator[list[str]]:
    """Give every rank a reserved port of its own within the block: "address:port" in rank order, on every rank."""
    address = place.peers[place.rank].address
    with reserved_port() as holder:
        host = f"[{address}]" if ":" in address else address
        addresses = place.gather(f"{host}:{holder.getsockname()[1]}")
        held.update(int(listening.rpartition(":")[2]) for listening in addresses)
        yield addresses


def without_proxy(place: Place) -> None:
    """Let gRPC connect to the other ranks directly, also where http_proxy is set."""
    name = "no_grpc_proxy"  # It is read in lower case only, and counts before no_proxy.
    before = os.environ.get(name) or os.environ.get("no_proxy")
    os.environ[name] = ",".join(filter(None, [before, *sorted({peer.address for peer in place.peers})]))
