"""Connect the ranks for LightGBM, which binds a port that was free a moment before (rank)."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tritium.errors import BadSetting
from tritium.frameworks.framework import Place
from tritium.wire import socket_at

_ATTEMPTS = 5
_LOOK_SECONDS = 0.002
"""The time between two checks whether LightGBM listens."""


def connect(
    place: Place,
    init: Callable[[list[str], int], None],
    free: Callable[[], None],
) -> None:
    """Connect this thread's LightGBM with those of all ranks. All call it at the same point of their programs.

    init : blocks until all ranks are connected; raises where the port of this rank, its second argument, is taken.
    free : ends the network of this thread.

    A port can be taken by another process before LightGBM binds it, as LightGBM shares it with no holder. All ranks
    then try again with other ports. Raises the error of `init` after five attempts.
    """
    address = place.peers[place.rank].address
    if ":" in address:
        raise BadSetting(f"LightGBM connects ranks over IPv4 only, and this rank's address is {address}.")
    for attempt in range(_ATTEMPTS):
        port = free_port()
        turns = _Turns(place, place.gather((address, port)))
        error = turns.take(init)
        if turns.failed is None:
            return
        free()
        if attempt == _ATTEMPTS - 1 and error is not None:
            raise error
    raise BadSetting(
        f"The ranks could not be connected for LightGBM: rank {turns.failed} could bind none of {_ATTEMPTS} ports."
    )


class _Turns:
    """One attempt to connect, in which ranks begin one after the other, the last one first.

    Each connects to the ranks after it, which listen by then, so that none waits for a rank whose port was taken.
    `init` blocks, so a second thread tells the others when this rank listens, and ends `init` if another rank fails.
    """

    def __init__(self, place: Place, ports: list[tuple[str, int]]) -> None:
        self._place, self._ports = place, ports
        self._returned = threading.Event()
        self._error: BaseException | None = None
        self.failed: int | None = None

    def take(self, init: Callable[[list[str], int], None]) -> BaseException | None:
        """Wait for this rank's turn, and connect it. Returns the error of `init`."""
        for turn in range(self._place.size - 1, self._place.rank, -1):
            if self._ended(turn, True):
                return None
        watch = threading.Thread(target=self._watch, name="tritium-lightgbm")
        watch.start()
        try:
            init([f"{address}:{port}" for address, port in self._ports], self._ports[self._place.rank][1])
        except Exception as error:  # noqa: BLE001 - `connect` raises it, when all ranks know
            self._error = error
        self._returned.set()
        watch.join()
        return self._error

    def _watch(self) -> None:
        port = self._ports[self._place.rank][1]
        while not self._returned.wait(_LOOK_SECONDS) and not listens(port):
            pass
        if self._ended(self._place.rank, self._error is None):
            return
        for turn in range(self._place.rank - 1, -1, -1):
            if self._ended(turn, True):
                self._stand_in()
                return

    def _ended(self, turn: int, well: bool) -> bool:
        """Return whether the rank whose turn it was has failed. All ranks call it once for each turn."""
        if not self._place.gather(well)[turn]:
            self.failed = turn
        return self.failed is not None

    def _stand_in(self) -> None:
        """Connect to this rank's LightGBM in place of the ranks that will not, so that `init` returns."""
        address, port = self._ports[self._place.rank]
        for rank in range(self._place.rank):
            with suppress(OSError), socket.create_connection((address, port)) as connection:
                connection.sendall(struct.pack("i", rank))


def listens(port: int) -> bool:
    """Return whether this process listens at a TCP port."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), socket_at(int(name)) as connection:
            known: Any = connection.getsockname() if connection.family == socket.AF_INET else ("", 0)
            if known[1] == port and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return True
    return False


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
