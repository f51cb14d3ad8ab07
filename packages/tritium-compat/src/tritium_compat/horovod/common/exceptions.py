"""`horovod.common.exceptions` (rank)."""

from tritium_compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
