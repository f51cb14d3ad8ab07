"""What a rank knows of its gang, and what it can say to the others (rank)."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tritium import ship
from tritium.errors import BadSetting, StoreFailed, TritiumError
from tritium.gang.rank.other_launchers import Elsewhere, launched_by
from tritium.gang.rank.peers import Control, Peer
from tritium.observe.stored import cut

if TYPE_CHECKING:
    from tritium.data.shard import Shard
    from tritium.gang.rank.checkpoints import Checkpoints


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

        return Checkpoints(self._control, rank=self.rank, size=self.size, host=self.host, run_id=self.run_id)

    def barrier(self) -> None:
        """Wait until every rank has called `barrier()`. Takes milliseconds; needs no framework."""
        self._control.all_gather("barrier", b"")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank.

        Any picklable value; all together at most 256 MiB. Raises TooLarge on the rank whose value alone is more, and
        TritiumError on every rank when all together are, or when a rank has already returned and so will never come.
        """
        return [pickle.loads(blob) for blob in self._control.all_gather("gather", _pickled(value))]

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


def outside(env: Mapping[str, str]) -> World:
    """The world of a process that Tritium did not start, from what its launcher put into the environment."""
    launcher, (rank, size, local_rank, local_size) = launched_by(env)
    host = socket.gethostname()
    torch = sys.modules.get("torch")
    device = f"cuda:{local_rank}" if torch is not None and torch.cuda.is_available() else "cpu"
    me = Peer(rank, host, "127.0.0.1", local_rank, device, os.getpid())
    peers = (me,) if size == 1 else ()
    return World(rank, size, local_rank, local_size, host, device, peers, "", Elsewhere(launcher, size))


def finish_checkpoints(world: World) -> None:
    """The rank's function has returned: wait for what it saved last. Raises what went wrong in it."""
    if "checkpoint" in vars(world):  # else it was never used, and is not imported in vain
        world.checkpoint.wait()


def settle_checkpoints(world: World) -> None:
    """As `finish_checkpoints`, where another error is on its way already."""
    if "checkpoint" in vars(world):
        world.checkpoint.settle()
