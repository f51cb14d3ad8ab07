"""Ports at which a rank's framework will listen (rank)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tritium.frameworks.framework import Place


@contextmanager
def held_ports(place: Place) -> Iterator[list[str]]:
    """Give every rank a port of its own within the block, as "address:port" in rank order; the same on every rank.

    The port is bound but never listens, so it is free for who sets SO_REUSEADDR (gRPC, Gloo, torch), and for no other.
    """
    address = place.peers[place.rank].address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        host = f"[{address}]" if family == socket.AF_INET6 else address
        yield place.gather(f"{host}:{holder.getsockname()[1]}")


def without_proxy(place: Place) -> None:
    """Let gRPC connect to the other ranks directly, also where http_proxy is set."""
    name = "no_grpc_proxy"  # gRPC reads it in lower case only; it counts before no_proxy
    before = os.environ.get(name) or os.environ.get("no_proxy")
    os.environ[name] = ",".join(filter(None, [before, *sorted({peer.address for peer in place.peers})]))
