"""The port that a rank's framework will listen at is no other process's until then."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from tritium.frameworks.ports import reserved_port

HAS_IPV6 = socket.has_ipv6 and bool(socket.getaddrinfo("::1", 0, flags=socket.AI_NUMERICHOST))


def bound(address: str, port: int, reuse: bool) -> socket.socket:
    """Return a socket that listens as a server does, on IPv4, too, for "::"."""
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        if address == "::":
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        server.bind((address, port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


@pytest.fixture(params=["both", "without IPv6"])
def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that is reserved until the test ends."""
    if request.param == "without IPv6":
        make = socket.socket

        def without_ipv6(family: int = socket.AF_INET, *args: int) -> socket.socket:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            return make(family, *args)

        monkeypatch.setattr(socket, "socket", without_ipv6)
    with reserved_port() as holder:
        monkeypatch.undo()
        yield holder.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_no_other_process_gets_a_reserved_port_on_any_address(port: int, address: str) -> None:
    with pytest.raises(OSError, match="Address already in use"):
        bound(address, port, reuse=False)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_framework_listens_at_a_reserved_port(port: int, address: str) -> None:
    if ":" in address and not HAS_IPV6:
        pytest.skip("needs IPv6")
    with bound(address, port, reuse=True) as server:
        assert server.getsockname()[1] == port
