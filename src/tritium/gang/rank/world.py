"""What a rank knows of its gang, and what it can say to the others (rank)."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from tritium import ship
from tritium.errors import BadSetting, StoreFailed, TritiumError
from tritium.gang.rank.heartbeat import Pulse
from tritium.observe.stored import Piece, cut

if TYPE_CHECKING:
    from tritium.data.shard import Shard
    from tritium.gang.rank.checkpoints import Checkpoints


@dataclass(frozen=True)
class Peer:
    """One rank of the gang, as every other sees it (Project Hydrogen's `getTaskInfos`)."""

    rank: int
    host: str
    address: str
    local_rank: int
    device: str
    pid: int


class Control(Protocol):
    """How a world reaches the rest of its gang."""

    pulse: Pulse
    run_dir: str
    elastic: bool
    """Whether the gang has fewer ranks than are wanted."""
    could_be_more: bool
    """Whether there are slots for more by now."""
    store_limit: int | None
    """Bytes of all files that can be stored in this run; None: as many as the run directory takes."""

    def meet(self, operation: str, value: bytes, lane: str = ...) -> list[bytes]: ...
    def post(self, operation: str, value: bytes, lane: str = ...) -> Callable[[], list[bytes]]: ...
    def tell(self, kind: str, **fields: Any) -> None: ...
    def log(self, fields: Mapping[str, Any]) -> None: ...
    def store(self, piece: Piece) -> None: ...
    def shard(self, name: str) -> Shard: ...
    def confirm_rows(self) -> None: ...


@dataclass(frozen=True)
class World:
    """The gang as one rank sees it. `tritium.world()` returns it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    device: str
    peers: tuple[Peer, ...]
    run_id: str
    _control: Control

    @cached_property
    def checkpoint(self) -> Checkpoints:
        """Saves and loads a state in the run directory, together with the other ranks."""
        if not self._control.run_dir:
            raise TritiumError(
                "There is no run to keep checkpoints in: this process was not started by tritium.launch(…, run_dir=…)."
            )
        from tritium.gang.rank.checkpoints import Checkpoints

        return Checkpoints(self, self._control)

    def barrier(self) -> None:
        """Wait until every rank has called `barrier()`. Takes milliseconds; needs no framework."""
        self._control.meet("barrier", b"")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank.

        Any picklable value; all together at most 256 MiB. Raises TooLarge on the rank whose value alone is more, and
        TritiumError on every rank when all together are, or when a rank has already returned and so will never come.
        """
        return [pickle.loads(blob) for blob in self._control.meet("gather", _pickled(value))]

    def log(
        self,
        *,
        step: int | None = None,
        steps: int | None = None,
        epoch: int | None = None,
        epochs: int | None = None,
        rows: int | None = None,
        **values: float,
    ) -> None:
        """Show and record numbers: in the live progress display, and as an event in the run directory.

        `step` of `steps` and `epoch` of `epochs` (both from 0) and `rows`, this rank's rows so far, drive the bar,
        the rows per second and the time left. Tensors of one element are taken as numbers.
        """
        progress = {"step": step, "steps": steps, "epoch": epoch, "epochs": epochs, "rows": rows}
        fields: dict[str, Any] = {k: int(v) for k, v in progress.items() if v is not None}
        wrong = {}
        for name, value in values.items():
            try:
                fields.setdefault("values", {})[name] = float(value)
            except (TypeError, ValueError) as error:
                wrong[name] = error
        if wrong:
            raise BadSetting(
                "world.log takes numbers: " + "; ".join(f"{name}={values[name]!r} is none" for name in wrong) + "."
            )
        self._control.log(fields)

    def note(self, text: str) -> None:
        """A line for the person who waits: in the progress display, the events and the report.

        Of a text over 64 KiB its beginning and its end are kept.
        """
        self._control.tell("note", text=text)

    def shard(self, name: str = "train") -> Shard:
        """The rows of the DataFrame `data[name]` that this rank trains on."""
        return self._control.shard(name)

    def store(self, name: str, chunks: bytes | Iterable[bytes]) -> None:
        """Write a file of the run directory from this rank, over the control connection: no shared disk is needed.

        `name` is relative to the run directory; `chunks` are its bytes, or an iterable of them: of up to 4 MiB each,
        they keep memory flat. The file has its name once its last chunk has come and its size and checksum are right:
        never by half, also when this rank is killed and its next attempt stores it again. What refuses it (a full disk,
        an object store) ends the run: StoreFailed. BadSetting for a chunk that is not bytes.
        """
        for piece in cut(name, chunks):
            self._control.store(piece)

    def expect_file(self, name: str, size: int) -> None:
        """Raise StoreFailed now, rather than after a training, if a file of `size` bytes could not be stored.

        Only what stored files must travel through limits them: Spark's results, over a Connect client that executors
        can't reach.
        """
        limit = self._control.store_limit
        if limit is not None and size > limit:
            raise StoreFailed(
                f"{name} of {size:,} bytes could not be stored at the end: executors reach neither this client nor its "
                "run directory, so stored files travel with the results, and spark.driver.maxResultSize lets "
                f"{limit:,} bytes through. Raise that setting where the Connect server is started, or choose a run_dir "
                "that executors and client reach (s3://…).",
                path=name,
                written=0,
                needed=size,
                free=limit,
            )


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):  # of a class that came by value, or a function
        return ship.pickle(value)


_lock = threading.Lock()
_current: list[World] = []


def world() -> World:
    """The gang that this process is a rank of.

    Answers in a rank of Tritium, under torchrun, under mpirun (Open MPI, MPICH), and in any other process, which is a
    world of one.
    """
    with _lock:
        if _current:
            return _current[-1]
    return outside(os.environ)


@contextmanager
def entered(world: World) -> Iterator[World]:
    """Make `world` the answer of `tritium.world()` in this process."""
    with _lock:
        _current.append(world)
    try:
        yield world
    finally:
        with _lock:
            _current.remove(world)


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


def outside(env: Mapping[str, str]) -> World:
    """The world of a process that Tritium did not start, from what its launcher put into the environment."""
    for launcher, families in _LAUNCHERS.items():
        for rank, size, local_rank, local_size in families:
            if rank in env and size in env:
                numbers = (
                    int(env[rank]),
                    int(env[size]),
                    int(env.get(local_rank, 0)),
                    int(env.get(local_size, 1)),
                )
                return _plain(numbers, Elsewhere(launcher, numbers[1]))
    return _plain((0, 1, 0, 1), Elsewhere("nothing", 1))


def _plain(numbers: tuple[int, int, int, int], control: Control) -> World:
    rank, size, local_rank, local_size = numbers
    host = socket.gethostname()
    torch = sys.modules.get("torch")
    device = f"cuda:{local_rank}" if torch is not None and torch.cuda.is_available() else "cpu"
    me = Peer(rank, host, "127.0.0.1", local_rank, device, os.getpid())
    peers = (me,) if size == 1 else ()
    return World(rank, size, local_rank, local_size, host, device, peers, "", control)


class Elsewhere:
    """The control of a process that another launcher started: collectives are that launcher's own."""

    run_dir = ""
    elastic = could_be_more = False
    store_limit: int | None = None

    def __init__(self, launcher: str, size: int) -> None:
        self.launcher = launcher
        self.size = size
        self.pulse = Pulse()

    def post(self, operation: str, value: bytes, lane: str = "main") -> Callable[[], list[bytes]]:
        """Other launchers have no such thing; all meet at once."""
        values = self.meet(operation, value)
        return lambda: values

    def tell(self, kind: str, **fields: Any) -> None:
        """One plain line of what is meant for people; there is no driver for the rest."""
        if kind == "note":
            print(fields["text"], flush=True)  # noqa: T201 - there is no progress display here

    def meet(self, operation: str, value: bytes, lane: str = "main") -> list[bytes]:
        """Through torch.distributed under torchrun, through mpi4py under mpirun."""
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
        return list(MPI.COMM_WORLD.allgather(value))

    def log(self, fields: Mapping[str, Any]) -> None:
        """One plain line, as any script would print."""
        words = {k: v for k, v in fields.items() if k != "values"} | fields.get("values", {})
        print(" ".join(f"{k}={v:.6g}" for k, v in words.items()), flush=True)  # noqa: T201 - there is no driver here

    def store(self, piece: Piece) -> None:
        """There is no run directory."""
        raise TritiumError(
            f"There is no run to store {piece.name!r} in: this process was not started by tritium.launch."
        )

    def shard(self, name: str) -> Shard:
        """There is no exchange."""
        raise TritiumError(
            f"There is no shard {name!r}: this process was not started by tritium.launch(…, data={{{name!r}: df}})."
        )

    def confirm_rows(self) -> None:
        """There are no shards."""


def peers_of(descriptions: Sequence[Mapping[str, Any]]) -> tuple[Peer, ...]:
    """Peers from an assignment."""
    return tuple(Peer(**{k: d[k] for k in Peer.__dataclass_fields__}) for d in descriptions)
