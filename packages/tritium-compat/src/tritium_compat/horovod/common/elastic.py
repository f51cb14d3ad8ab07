"""`horovod.common.elastic` (rank)."""

from tritium_compat.horovod.elastic import ObjectState, State, run_fn
from tritium_compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]
