"""Horovod: tell the ranks of each other for `hvd.init()`, without horovodrun, MPI and SSH (rank)."""

from __future__ import annotations

import atexit
import functools
import importlib
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritium import aliases
from tritium.errors import BadSetting
from tritium.frameworks.framework import Framework, Place

if TYPE_CHECKING:
    from tritium.observe.trace import Trace

_LIBRARIES = ("torch", "tensorflow", "mxnet")
_BASICS = "horovod.common.basics"
_PATIENCE_SECONDS = 24 * 3600  # Gloo's own 30 s would end ranks that Tritium lets wait, see `stall_timeout`.


@dataclass(frozen=True, kw_only=True)
class Horovod(Framework):
    """Horovod: `hvd.init()` connects the ranks by Gloo; gradients travel as Horovod was built to send them."""

    name = "horovod"
    modules = ("horovod",)
    covers = ("torch", "tensorflow", "tf_keras", "keras")
    install = "horovod"
    float32 = True
    secondary = re.compile(r"Horovod has been shut down|^HorovodInternalError: .*(gloo|nccl|connection)", re.I | re.S)

    def load(self) -> None:
        """Import Horovod, and PyTorch where Horovod was built for that alone, as TensorFlow's import starts threads."""
        super().load()
        if self.modules[0] in aliases.active():
            importlib.import_module("horovod.torch")
            return
        _check_at_init()
        home = Path(str(sys.modules["horovod"].__file__)).parent
        if [library for library in _LIBRARIES if any(home.glob(f"{library}/mpi_lib*"))] == ["torch"]:
            importlib.import_module("horovod.torch")

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the function, then `hvd.shutdown()` where it has initialized Horovod.

        Rank 0 serves the store in which the ranks find each other, for as long as any rank's function runs: a process
        exits when all have returned. Tritium's own module of that name needs nothing but torchrun's variables.
        """
        if self.modules[0] in aliases.active():
            return function()
        os.environ.update(variables(place))
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(_PATIENCE_SECONDS))
        if "GLOO_SOCKET_IFNAME" in os.environ:  # By it the hosts reach each other.
            os.environ.setdefault("HOROVOD_GLOO_IFACE", os.environ["GLOO_SOCKET_IFNAME"])
        if place.size > 1:
            os.environ.update(_store(place))
        result = function()
        for library in _LIBRARIES:
            hvd: Any = sys.modules.get(f"horovod.{library}.mpi_ops")
            if hvd is not None and hvd.is_initialized():
                hvd.shutdown()
        return result

    def trace(self, trace: Trace) -> None:
        """Measure forward, backward and optimizer of torch, and the waits for Horovod's collectives."""
        from tritium.frameworks.torch_trace import hook, within

        hook(trace)
        for name in ("mpi_ops", "optimizer"):
            part: Any = sys.modules.get(f"horovod.torch.{name}")
            if part is not None:
                part.synchronize = within(trace, "communicate", part.synchronize)


def variables(place: Place) -> dict[str, str]:
    """Return Horovod's variables of a rank. Its "cross" ranks are those of all hosts with the same local rank."""
    across = [rank for rank, peer in enumerate(place.peers) if peer.local_rank == place.local_rank]
    return {
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(across.index(place.rank)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_HOSTNAME": place.host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _store(place: Place) -> dict[str, str]:
    """Let rank 0 serve the store until its process exits; return the variables that say where. Raises BadSetting."""
    address, port = place.peers[0].address, 0
    if ":" in address:
        raise BadSetting(
            f"Horovod finds its ranks by IPv4 only, and rank 0 has the address {address}. Set "
            "spark.tritium.driver.host to an IPv4 address of the driver.",
            setting="framework",
        )
    if place.rank == 0:
        from tritium.frameworks.http_store import HTTPStore

        store = HTTPStore(address)
        atexit.register(store.close)
        port = store.port
    every = place.gather((port, *_own_name()))
    _check_addresses(place, [known for _, *known in every])
    return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(every[0][0])}


def _own_name() -> tuple[str, str | None]:
    """Return the name of this host, and the address it resolves to here, if any."""
    name = socket.gethostname()
    try:
        return name, str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name, None


def _check_addresses(place: Place, names: Sequence[Sequence[str | None]]) -> None:
    """Raise BadSetting, the same on every rank, where Horovod's ranks would not find each other.

    Horovod 0.28 heeds HOROVOD_GLOO_IFACE for its first connections only (`InitializeForProcessSet`): it makes the
    others at the address that the name of the host resolves to. Without an address, it ends by SIGSEGV.
    """
    several = len({peer.host for peer in place.peers}) > 1
    for rank, (name, resolved) in enumerate(names):
        if resolved is None or (several and ipaddress.ip_address(resolved).is_loopback):
            known = "nothing" if resolved is None else f"{resolved}, where other hosts can't reach it"
            peer = place.peers[rank]
            raise BadSetting(
                f"Horovod connects ranks at what the name of their host resolves to, and on {peer.host}, the host of "
                f"rank {rank}, the name {name} resolves to {known}. Let it resolve to {peer.address} there, in "
                "/etc/hosts for example.",
                setting="framework",
            )


def _check_at_init() -> None:
    """Let `hvd.init()` raise BadSetting in a rank that it has not connected: each would train a model of its own."""
    basics: Any = importlib.import_module(_BASICS).HorovodBasics
    if hasattr(basics.init, "__wrapped__"):  # `load` was called in this process before.
        return
    init = basics.init

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        ranks = int(os.environ.get("WORLD_SIZE", self.size()))
        if self.size() != ranks:
            raise BadSetting(
                f"hvd.init() has formed a world of {self.size()}, and this gang has {ranks} ranks. Leave Horovod's "
                "variables (HOROVOD_…) and the arguments of hvd.init() out; Horovod needs Gloo, which "
                "HOROVOD_WITH_GLOO=1 builds it with.",
                setting="framework",
            )

    basics.init = checked
