"""The address on which the coordinator listens, and the one that executors connect to (driver)."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tritium.errors import BadSetting
from tritium.gang.control.address import HOST, PORT, family_of, listener
from tritium.spark.cluster.base import Cluster

BIND = "spark.tritium.driver.bindAddress"
_PORTS = "spark.port.maxRetries"
"""The setting of the number of further ports to try, as Spark does for its own."""
_ANY = ("0.0.0.0", "::")


@dataclass(frozen=True)
class ListenAddress:
    """An address to listen on. `ports` are tried in order; 0 means any free port."""

    bind: str
    advertised: str
    """The name or address that executors connect to."""
    ports: Sequence[int] = (0,)
    setting: str = HOST
    """The Spark setting that an error names when executors can't reach it."""

    def listen(self) -> socket.socket:
        """Return a listening socket. Raises BadSetting for another machine's address, or when every port is taken."""
        refused: OSError | None = None
        for address in _resolved(self.bind, BIND):
            for port in self.ports:
                try:
                    return listener(address, port)
                except OSError as error:
                    refused = error
                    if error.errno != errno.EADDRINUSE:
                        break
        assert refused is not None
        if refused.errno == errno.EADDRINUSE:
            raise BadSetting(
                f"{PORT}={self.ports[0]}: the ports {self.ports[0]} to {self.ports[-1]} of {self.bind} are taken "
                f"({_PORTS} says how many are tried). Choose another, or leave it out for any that is free.",
                setting=PORT,
            )
        raise BadSetting(
            f"This driver can't listen on {self.bind!r}: {refused.strerror}. Executors are told to connect to "
            f"{self.advertised!r} ({self.setting}); where that is not an address of this machine (NAT, a service's "
            f"name), set spark.driver.bindAddress or {BIND} to one that is, such as 0.0.0.0.",
            setting=BIND,
        )


def driver_place(spark: Any, cluster: Cluster) -> ListenAddress:
    """Derive the coordinator's address from the settings `spark.tritium.driver.*` and Spark's own.

    Raises BadSetting for a setting that can't work: a name that does not resolve, an address that only this machine
    can reach while executors run on others.
    """
    host, setting = _setting(spark, HOST), ""
    if not host:
        host, setting = cluster.driver_host()
    bind = _setting(spark, BIND) or _unbracketed(cluster.driver_bind_address())
    host = _unbracketed(host)
    place = ListenAddress(bind or host, host, _ports(spark), setting or HOST)
    _refuse_loopback(place, cluster.executor_hosts)
    return place


def _setting(spark: Any, name: str) -> str:
    return _unbracketed(str(spark.conf.get(name, "") or "").strip())


def _unbracketed(address: str) -> str:
    """Return an address of IPv6 without the brackets in which Spark writes it."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def _ports(spark: Any) -> Sequence[int]:
    text, more = _setting(spark, PORT) or "0", _setting(spark, _PORTS) or "16"
    if not text.isdecimal() or not 0 <= int(text) < 1 << 16:
        raise BadSetting(f"{PORT}={text!r} must be a port, or 0 for any that is free.", setting=PORT)
    port = int(text)
    return range(port, min(port + int(more) + 1, 1 << 16)) if port else (0,)


def _resolved(name: str, setting: str) -> list[str]:
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadSetting(f"{setting}={name!r} is no address, and no name that is known here: {error}.") from error
    return list(dict.fromkeys(str(address[4][0]) for address in addresses))


def _refuse_loopback(place: ListenAddress, executors: Callable[[], Sequence[str]]) -> None:
    """Raise BadSetting before anything is submitted, if the address is loopback and executors run elsewhere."""
    name = place.advertised if place.bind in _ANY else place.bind
    if place.bind in _ANY and not _is_numeric(name):
        return  # Executors resolve the name themselves, without this machine's /etc/hosts.
    addresses = _resolved(name, place.setting)
    if not all(_is_loopback(address) for address in addresses):
        return
    elsewhere = next((host for host in executors() if not _is_here(host)), None)
    if elsewhere is not None:
        raise BadSetting(
            f"The executor on {elsewhere} can't reach this driver: {place.setting}={place.advertised!r} is "
            f"{addresses[0]} here, where only this machine reaches it (Debian's /etc/hosts names itself 127.0.1.1). "
            "Set spark.driver.host to an address of this machine that executors can reach; with a name that they can "
            f"resolve, spark.driver.bindAddress=0.0.0.0. Of Tritium alone: {HOST} and {BIND}.",
            setting=place.setting,
        )


def _is_numeric(name: str) -> bool:
    return ":" in name or name.replace(".", "").isdecimal()


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith(("127.", "::ffff:127."))


def _is_here(host: str) -> bool:
    """Tell whether an executor's host is this machine, by binding to its address."""
    try:
        addresses = _resolved(host.strip("[]"), "an executor's host")
    except BadSetting:
        return False
    for address in addresses:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return True
    return False
