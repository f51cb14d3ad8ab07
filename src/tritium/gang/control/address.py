"""Listening sockets, and the error about an address that can't be reached (driver, supervisor, rank)."""

from __future__ import annotations

import re
import socket

from tritium.errors import BadSetting
from tritium.wire import address_text

HOST = "spark.tritium.driver.host"
PORT = "spark.tritium.driver.port"
_MARK = "can't reach the coordinator at "


def listener(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket on an IPv4 or IPv6 address; "::" accepts both. Port 0 is any free one."""
    family, both = family_of(address), address == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((address, port), family=family, backlog=1024, dualstack_ipv6=both)


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def unreachable(host: str, address: tuple[str, int], seconds: float, error: Exception) -> str:
    """Return the message of a supervisor on `host` that can't reach the coordinator."""
    return f"The executor on {host} {_MARK}{address_text(address)}, tried for {seconds:g} s: {error}"


def unreachable_executor(host: str, address: tuple[str, int], seconds: float, error: Exception) -> str:
    """Return the message of a supervisor on `host` that can't reach the coordinator on another executor."""
    return (
        f"The executor on {host} can't reach the first task's at {address_text(address)}, tried for {seconds:g} s: "
        f"{error} Executors reach neither the driver nor each other: let firewalls and NetworkPolicies pass TCP "
        "between them."
    )


def unreachable_in(line: str) -> BadSetting | None:
    """Return the driver's error if `line`, the last of a traceback, has the message of `unreachable`; else None."""
    match = re.search(rf"The executor on \S+ {_MARK}(\S+), tried for .*", line)
    if match is None:
        return None
    return BadSetting(
        f"{match[0].strip()} Executors must reach this driver there: set spark.driver.host, or {HOST}, to an address "
        f"of it that they can reach, and {PORT} to a port that firewalls and NetworkPolicies let through.",
        setting=HOST,
        address=match[1],
    )


def addresses_v6() -> dict[str, str]:
    """Return IPv6 address → network interface of this host (Linux)."""
    try:
        with open("/proc/net/if_inet6") as table:  # A line has address, index, prefix, scope, flags and name.
            lines = [line.split() for line in table]
    except OSError:
        return {}
    return {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0])): line[5] for line in lines}
