"""Ports at which a rank's framework will listen (supervisor and rank)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tritium.frameworks.framework import Place


def reserved_port(address: str) -> socket.socket:
    """Return a socket that is bound to a free port of the address. The caller closes it.

    It never listens, so the port is free for who sets SO_REUSEADDR, as torch and gRPC do, and for no other.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


@contextmanager
def held_ports(place: Place) -> Iterator[list[str]]:
    """Give every rank a reserved port of its own within the block: "address:port" in rank order, on every rank."""
    address = place.peers[place.rank].address
    with reserved_port(address) as holder:
        host = f"[{address}]" if ":" in address else address
        yield place.gather(f"{host}:{holder.getsockname()[1]}")


def without_proxy(place: Place) -> None:
    """Let gRPC connect to the other ranks directly, also where http_proxy is set."""
    name = "no_grpc_proxy"  # gRPC reads it in lower case only; it counts before no_proxy
    before = os.environ.get(name) or os.environ.get("no_proxy")
    os.environ[name] = ",".join(filter(None, [before, *sorted({peer.address for peer in place.peers})]))
