"""`horovod.torch.mpi_ops`, from which old code imports collectives: the names of `horovod.torch` (rank)."""

from tritium_compat.horovod.torch import *  # noqa: F403
