"""The exceptions of Horovod's API (rank)."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective that can't be done: ranks differ in it, or the connection to a rank is lost."""


class HostsUpdatedInterrupt(RuntimeError):
    """There are slots for more ranks: `elastic.run` then starts the gang again with them, from the state as it is."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("there are slots for more ranks")
        self.skip_sync = skip_sync
