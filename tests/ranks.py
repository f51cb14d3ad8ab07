"""Functions of ranks that tests of several files share."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Container
from pathlib import Path

import psutil

import tritium as tr
from tritium.wire import peer


def supervisor() -> int:
    """Return the pid of this rank's supervisor: the process that has made the socket between them (Linux)."""
    channel: socket.socket = tr.world()._control._channel._socket  # type: ignore[attr-defined]
    return peer(channel)[0]


def rank_below(supervisor: psutil.Process, others: Container[psutil.Process]) -> psutil.Process:
    """Return the only rank below this process; before it is forked, the fork server, which stands for it.

    others : further children, such as the JVM of a session and what tests before have left for the next.
    """
    (server,) = (child for child in supervisor.children() if child not in others)
    return next(iter(server.children()), server)


def reduce_for_ever(place: str) -> None:
    """All-reduce until something ends the rank; `place/pid-…` exists once it does."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    Path(place, f"pid-{os.getpid()}").touch()
    while True:
        dist.all_reduce(torch.ones(1 << 16))


def rank_1_is_killed_once(place: Path) -> Callable[[], int]:
    """Return a function whose rank 1 is killed in the first attempt, and which returns the number of ranks."""

    def train() -> int:
        world = tr.world()
        world.barrier()
        if world.rank == 1 and not place.joinpath("killed").exists():
            place.joinpath("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sum(world.gather(1))

    return train
