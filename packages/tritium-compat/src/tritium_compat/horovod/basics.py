"""What all of Horovod's front ends have: `init`, ranks, what is built in, and process sets (rank)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Tritium's Horovod does its collectives by PyTorch, which is not installed here, also for TensorFlow and "
        "Keras. Install it in the Python of the ranks: pip install torch.",
        name="torch",
    ) from error

from tritium_compat.horovod import context

__all__ = [
    "Adasum",
    "Average",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
"""The names that every front end has."""

Average, Sum, Adasum, Min, Max, Product = "average", "sum", "adasum", "min", "max", "product"


class ProcessSet:
    """Ranks that do collectives among themselves."""

    def __init__(self, ranks: Any = ()) -> None:
        """Describe a set, which `add_process_set` or `init(process_sets=[…])` adds. ranks : those that are in it."""
        self._given = None if ranks is None else sorted({int(rank) for rank in ranks})
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int] | None:
        """The ranks in it."""
        if self.process_set_id is None:
            return self._given
        return list(context.current().sets[self.process_set_id])

    def _number(self) -> int:
        if self.process_set_id is None:
            raise ValueError("This process set has not been added; call hvd.add_process_set with it on every rank.")
        return self.process_set_id

    def size(self) -> int:
        """Return how many ranks are in it."""
        return len(context.current().sets[self._number()])

    def rank(self) -> int:
        """Return the place of this rank in it."""
        return context.current().sets[self._number()].index(rank())

    def included(self) -> bool:
        """Return whether this rank is in it."""
        return rank() in context.current().sets[self._number()]

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _Global(ProcessSet):
    def __init__(self) -> None:
        super().__init__(None)
        self.process_set_id = 0


global_process_set = _Global()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Connect the ranks of this gang. Outside a gang there is one rank.

    comm : not taken: an MPI communicator, or a list of ranks.
    process_sets : a list of `ProcessSet` to be added.
    """
    if comm is not None and list(comm if isinstance(comm, Sequence) else [comm]) != []:
        raise NotImplementedError(
            "hvd.init(comm=…): Tritium's Horovod has no communicators of MPI. Leave it out, and use process sets for "
            "some of the ranks."
        )
    context.begin()
    if isinstance(process_sets, str):  # "dynamic": they may always be added
        process_sets = None
    for one in process_sets or ():
        add_process_set(one)


def shutdown() -> None:
    """Disconnect the ranks, together with the others."""
    context.end()


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return context.has_begun()


def add_process_set(process_set: Any) -> ProcessSet:
    """Add a set of ranks, which every rank must do, with the same ranks and in the same order."""
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    now = context.current()
    ranks = made._given or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= now.size:
        raise ValueError(f"A process set of the ranks {ranks} can't be added: there are the ranks 0 to {now.size - 1}.")
    if tuple(ranks) in now.sets.values():
        raise ValueError(f"There is a process set of the ranks {ranks} already.")
    made.process_set_id = now.add_set(ranks)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set, which every rank must do. Returns False for one that is not there."""
    number = process_set.process_set_id
    if number is None or number == 0 or number not in context.current().sets:
        return False
    ranks = process_set.ranks
    context.current().remove_set(number)
    process_set.process_set_id, process_set._given = None, ranks
    return True


def rank() -> int:
    """Return the number of this rank."""
    return context.current().rank


def size() -> int:
    """Return how many ranks there are."""
    return context.current().size


def local_rank() -> int:
    """Return the number of this rank on its host."""
    return context.current().local_rank


def local_size() -> int:
    """Return how many ranks there are on this host."""
    return context.current().local_size


def cross_rank() -> int:
    """Return the place of this rank among those with the same local rank."""
    return context.current().cross_rank


def cross_size() -> int:
    """Return how many ranks have this local rank."""
    return context.current().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have equally many ranks."""
    return context.current().homogeneous


def gloo_built() -> bool:
    """Return True: collectives of tensors on CPUs go over Gloo."""
    return True


def gloo_enabled() -> bool:
    """Return True."""
    return True


def nccl_built() -> int:
    """Return NCCL's version, which collectives of tensors on GPUs go over; 0 where torch has none."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return int("".join(f"{part:02d}" for part in version)) if isinstance(version, tuple) else int(version)


def cuda_built() -> bool:
    """Return whether torch has been built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch has been built with ROCm."""
    return torch.version.hip is not None


def mpi_built() -> bool:
    """Return False: ranks find each other without MPI."""
    return False


mpi_enabled = ddl_built = ccl_built = mpi_built


def mpi_threads_supported() -> bool:
    """Return False: there is no MPI."""
    context.current()
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Say that there is no timeline: `tr.launch(trace=True)` is in its place."""
    raise NotImplementedError(
        f"hvd.start_timeline({file_path!r}): there is no timeline of Horovod. Give trace=True to tr.launch, and read "
        "its report."
    )


def stop_timeline() -> None:
    """Do nothing: no timeline was started."""
