"""Ranks that mpirun has started: who the others are, and where a process group forms (rank)."""

from __future__ import annotations

import dataclasses
import os
import socket

from tritium.frameworks.ports import reserved_port
from tritium.gang.rank.environment import prepare_environment
from tritium.gang.rank.other_launchers import Elsewhere
from tritium.gang.rank.peers import Peer
from tritium.gang.rank.world import World, enter, world

_holders: list[socket.socket] = []
"""Of rank 0: keeps the port free until a process group forms there, however late."""


def join_mpirun() -> World:
    """Return the world, where mpirun has started this process with `peers`, and with torchrun's variables set.

    All ranks call it. `torch.distributed.init_process_group()` and `horovod.torch` of Tritium then need no arguments.
    Elsewhere, and for the second time, nothing is done.

    Raises TritiumError where mpi4py is missing, or uses another MPI than that of mpirun.
    """
    here = world()
    control = here._control
    if here.peers or not isinstance(control, Elsewhere) or control.launcher != "mpirun":
        return here
    port = 0
    if here.rank == 0:
        _holders.append(reserved_port())
        port = _holders[0].getsockname()[1]
    address = "127.0.0.1" if here.local_size == here.size else _routed_address()
    me = Peer(here.rank, here.host, address, here.local_rank, here.device, os.getpid())
    answers = here.gather((me, port))
    joined = dataclasses.replace(here, peers=tuple(peer for peer, _ in answers))
    port = answers[0][1]
    prepare_environment(joined, {"master_port": port, "visible": ()})
    enter(joined)
    return joined


def _routed_address() -> str:
    """Return the address of this host on the network by which it reaches others. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # It is reserved for documentation (RFC 5737): only the route counts.
        except OSError:  # There is no route out of the cluster.
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])
