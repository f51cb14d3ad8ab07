"""Ranks of torchrun and mpirun, and processes without a launcher: their environment and collectives (rank)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tritium.errors import TritiumError
from tritium.events import Event, Logged, Note
from tritium.gang.rank.progress_page import ProgressWriter
from tritium.observe.stored import Piece

if TYPE_CHECKING:
    from tritium.data.shard import Shard
    from tritium.tls import Certificate

_LAUNCHERS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "torchrun": (("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),),
    "mpirun": (
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ),
}


def launched_by(env: Mapping[str, str]) -> tuple[str, tuple[int, int, int, int]]:
    """Return the launcher's name, and (rank, size, local rank, local size) from the environment."""
    for launcher, families in _LAUNCHERS.items():
        for rank, size, local_rank, local_size in families:
            if rank in env and size in env:
                return launcher, (
                    int(env[rank]),
                    int(env[size]),
                    int(env.get(local_rank, 0)),
                    int(env.get(local_size, 1)),
                )
    return "nothing", (0, 1, 0, 1)


class Elsewhere:
    """The control of a process that another launcher started; collectives are the launcher's."""

    run_dir = ""
    elastic = could_be_more = False
    store_limit: int | None = None
    certificate: Certificate | None = None
    notice: float | None = None

    def __init__(self, launcher: str, size: int) -> None:
        self.launcher = launcher
        self.size = size
        self.progress = ProgressWriter()

    def all_gather_async(self, operation: str, value: bytes, tag: str = "main") -> Callable[[], list[bytes]]:
        """Gather at once, as other launchers have no asynchronous all-gather here, and return a function for it."""
        values = self.all_gather(operation, value)
        return lambda: values

    def tell(self, event: Event) -> None:
        """Print a note, and logged numbers in one line; ignore other events, as there is no driver."""
        text = event.text if isinstance(event, Note) else ""
        if isinstance(event, Logged):
            position = {name: value for name, value in event.fields().items() if name not in ("rank", "values")}
            text = " ".join(f"{name}={value:.6g}" for name, value in {**position, **(event.values or {})}.items())
        if text:
            print(text, flush=True)  # noqa: T201 - There is no progress display here.

    def all_gather(self, operation: str, value: bytes, tag: str = "main") -> list[bytes]:
        """Gather with torch.distributed under torchrun, with mpi4py under mpirun. Raises TritiumError without these."""
        if self.size == 1:
            return [value]
        if self.launcher == "torchrun":
            import torch.distributed as dist

            if not dist.is_initialized():
                raise TritiumError(
                    f"world.{operation}() under torchrun needs the process group: call "
                    "torch.distributed.init_process_group() first."
                )
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value)
            return values
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise TritiumError(f"world.{operation}() under mpirun needs mpi4py: pip install mpi4py.") from error
        if (ranks := MPI.COMM_WORLD.Get_size()) != self.size:
            raise TritiumError(
                f"mpirun has started {self.size} ranks, and MPI.COMM_WORLD of mpi4py has {ranks}: it uses "
                f"{MPI.get_vendor()[0]}, which is not the MPI of this mpirun. Name the library of that in "
                "MPI4PY_LIBMPI, or install mpi4py for it."
            )
        return list(MPI.COMM_WORLD.allgather(value))

    def store(self, piece: Piece) -> None:
        """Raise TritiumError: there is no run directory."""
        raise TritiumError(
            f"There is no run to store {piece.name!r} in: this process was not started by tritium.launch."
        )

    def shard(self, name: str) -> Shard:
        """Raise TritiumError: there is no exchange."""
        raise TritiumError(
            f"There is no shard {name!r}: this process was not started by tritium.launch(…, data={{{name!r}: df}})."
        )

    def confirm_rows(self) -> None:
        """Return at once: there are no shards."""
