"""`horovod.common.elastic` (rank)."""

from tritium.compat.horovod.elastic import ObjectState, State, run_fn
from tritium.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]
