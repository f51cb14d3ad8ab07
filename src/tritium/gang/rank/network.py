"""By which addresses the hosts of a gang reach each other (rank).

A host may have several networks, and the one that leads to the driver need not lead to the other hosts. Names are not
asked: a host's name may stand for an address that only the host itself can reach.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from tritium.errors import BadSetting
from tritium.gang.control.address import addresses_v6, listener
from tritium.gang.rank.world import World

REACH_SECONDS = 4.0
"""The limit of an attempt to connect: two rounds of attempts with their all-gathers end within 30 s."""
_AT_ONCE = 64
_HOSTS_NAMED = 4
_SIOCGIFADDR = 0x8915  # From Linux's sockios.h, as Python has no name for it.

Reached = Mapping[str, Sequence[int]]
"""First rank of another host → the indices of its addresses at which it was reached."""


@dataclass(frozen=True)
class HostAddresses:
    """The addresses of the host of `rank`, its first one, and where it listens. The likeliest address is the first."""

    rank: int
    addresses: Sequence[str]
    interfaces: Sequence[str]
    port: int
    token: str


def connected(world: World, *, required: bool) -> World:
    """Return the world with addresses of its peers at which each host is reached from all others.

    required : whether the ranks must reach each other; else a host that is not reached keeps its address.

    All ranks call it. The addresses by which hosts have reached the coordinator are tried first, and all others only of
    those hosts where that failed. Raises BadSetting, the same on every rank, for a host that is not reached.
    """
    leaders = {(peer.host, peer.address): peer.rank for peer in reversed(world.peers)}
    if len(leaders) == 1:
        return world
    order, leads = sorted(leaders.values()), world.rank in leaders.values()

    def exchanged(value: object) -> list[object]:
        answers = world._control.all_gather("the search for a network", json.dumps(value).encode(), "network")
        return [json.loads(answers[rank]) for rank in order]

    with _listening() as (port, token):
        hosts = [HostAddresses(**facts) for facts in exchanged(_own_facts(world, port, token))]  # type: ignore[arg-type]
        others = [host for host in hosts if leads and host.rank != world.rank]
        best = _best(hosts, exchanged(_reached(others, 1)))  # type: ignore[arg-type]
        missed = [host for host in hosts if host.rank not in best]
        if missed:
            best |= _best(missed, exchanged(_reached([host for host in others if host in missed], None)))  # type: ignore[arg-type]
    if required and (lost := [host for host in missed if host.rank not in best]):
        raise _not_reached(world, lost[0])
    if world.rank == 0:
        world.note(_described(world, hosts, best))
    addresses = {host.rank: host.addresses[best.get(host.rank, 0)] for host in hosts}
    peers = (replace(peer, address=addresses[leaders[peer.host, peer.address]]) for peer in world.peers)
    return replace(world, peers=tuple(peers))


def interfaces() -> dict[str, str]:
    """Return address → network interface of this host (Linux), without addresses that only the host itself has."""
    if sys.platform != "linux":
        return {}
    import fcntl
    import struct

    names: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            with suppress(OSError):  # This interface has no IPv4 address.
                names[socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])] = name
    return names | addresses_v6()


def _own_facts(world: World, port: int, token: str) -> dict[str, object]:
    likeliest, known = world.peers[world.rank].address, interfaces()
    rest = [address for address in known if address != likeliest and not address.startswith(("127.", "::1", "fe80"))]
    addresses = [likeliest, *rest]
    names = [known.get(address, "") for address in addresses]
    return {"rank": world.rank, "addresses": addresses, "interfaces": names, "port": port, "token": token}


@contextmanager
def _listening() -> Iterator[tuple[int, str]]:
    """Yield a port at which every connection gets a word within the block, and that word."""
    token = secrets.token_hex(8)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # It was shut down.
                return
            with connection, suppress(OSError):
                connection.sendall(token.encode())

    server = listener("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    thread = threading.Thread(target=serve, name="tritium-network", daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1], token
    finally:
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(1.0)


def _reached(hosts: Sequence[HostAddresses], most: int | None) -> Reached:
    """Try the first `most` addresses of each host, and return those that lead there."""
    tries = [(host, index) for host in hosts for index in range(len(host.addresses[:most]))]
    if not tries:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(tries))) as pool:
        answers = list(pool.map(lambda one: _leads_to(one[0], one[0].addresses[one[1]]), tries))
    reached: dict[str, list[int]] = {}
    for (host, index), answer in zip(tries, answers, strict=True):
        if answer:
            reached.setdefault(str(host.rank), []).append(index)
    return reached


def _leads_to(host: HostAddresses, address: str) -> bool:
    """Tell whether `address` is this host's from here: elsewhere, an address such as 172.17.0.1 is another host's."""
    try:
        with socket.create_connection((address, host.port), REACH_SECONDS) as connection:
            return connection.makefile("rb").read(len(host.token)) == host.token.encode()
    except OSError:
        return False


def _best(hosts: Sequence[HostAddresses], answers: Sequence[Reached]) -> dict[int, int]:
    """Return first rank → index of the first address at which all other hosts have reached it, where there is one."""
    best: dict[int, int] = {}
    for host in hosts:
        reached = [set(answer.get(str(host.rank), ())) for answer in answers]
        enough = len(answers) - 1  # The host itself has not tried.
        for index in range(len(host.addresses)):
            if host.rank not in best and sum(index in indices for indices in reached) >= enough:
                best[host.rank] = index
    return best


def _not_reached(world: World, host: HostAddresses) -> BadSetting:
    name = world.peers[host.rank].host
    return BadSetting(
        f"The ranks can't connect to each other: host {name} of rank {host.rank} has the addresses "
        f"{', '.join(host.addresses)}, and all other hosts reach none of them (tried for {REACH_SECONDS:g} s). Let "
        "firewalls and NetworkPolicies pass TCP between executors, or leave framework= out if ranks need none.",
        setting="framework",
        host=name,
    )


def _described(world: World, hosts: Sequence[HostAddresses], best: Mapping[int, int]) -> str:
    places = [
        f"{world.peers[host.rank].host} {host.addresses[best[host.rank]]}"
        + f" ({host.interfaces[best[host.rank]]})" * bool(host.interfaces[best[host.rank]])
        if host.rank in best
        else f"{world.peers[host.rank].host} not by all"
        for host in hosts[:_HOSTS_NAMED]
    ]
    more = ", …" if len(hosts) > _HOSTS_NAMED else ""
    return (
        f"hosts reach each other at: {', '.join(places)}{more} (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of each, "
        "unless they were set)"
    )
