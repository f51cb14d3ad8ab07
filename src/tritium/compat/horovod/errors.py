"""The exceptions of Horovod's API (rank)."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective that can't be done: ranks differ in it, or the connection to a rank is lost."""


class HostsUpdatedInterrupt(RuntimeError):
    """The number of ranks changes. Tritium starts a gang anew in that case, so that this is never raised."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks have changed")
        self.skip_sync = skip_sync
