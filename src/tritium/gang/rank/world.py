"""`World`: a rank's view of its gang, its collectives, rows, logs and files (rank)."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tritium import ship
from tritium.errors import BadSetting, StoreFailed, TritiumError
from tritium.events import Logged, Note
from tritium.gang.rank.other_launchers import Elsewhere, launched_by
from tritium.gang.rank.peers import Peer, WorldControl
from tritium.observe.stored import cut

if TYPE_CHECKING:
    from tritium.checkpoint.checkpoints import Checkpoints
    from tritium.data.shard import Shard


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
    _control: WorldControl

    @property
    def run_dir(self) -> str:
        """The run directory, a path or a URL; "" without one. This rank may not reach it: `store` needs not to."""
        return self._control.run_dir

    @cached_property
    def checkpoint(self) -> Checkpoints:
        """Saves and loads a state in the run directory, together with the other ranks; see Checkpoints."""
        if not self._control.run_dir:
            raise TritiumError(
                "There is no run to keep checkpoints in: this process was not started by tritium.launch(…, run_dir=…)."
            )
        from tritium.checkpoint.checkpoints import Checkpoints

        return Checkpoints(self._control, rank=self.rank, size=self.size, host=self.host, run_id=self.run_id)

    @property
    def preempted(self) -> float | None:
        """The seconds that are left to this gang, once its end was announced; None before.

        Spark announces it for an executor that it decommissions (`spark.decommission.enabled`), and Tritium when
        `max_runtime` has passed. It is `math.inf` where the cluster names no limit, and 0 when the time is over. A
        function that calls `world.checkpoint.save(…, every=…)` at every step need not look: see there.
        """
        notice = self._control.notice
        return None if notice is None else max(0.0, notice - time.monotonic())

    def barrier(self) -> None:
        """Wait until every rank has called `barrier()`. Takes milliseconds, and needs no framework."""
        self._control.all_gather("barrier", b"")

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank.

        Takes any picklable value; all together may have 256 MiB. Raises TooLarge on the rank whose value alone exceeds
        that, and TritiumError on every rank when all together do, or when a rank has already returned.
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
        histograms: Mapping[str, Any] | None = None,
        **values: float,
    ) -> None:
        """Show and record numbers: in the live progress display, and as an event in the run directory.

        step       : the current one of `steps`, from 0. It drives the bar and the time left, as does `epoch`.
        epoch      : the current one of `epochs`, from 0.
        rows       : this rank's rows so far, for the rows per second.
        histograms : arrays or tensors by name, of any shape. Rank 0 counts each in 30 bins, for TensorBoard
                     (`tritium.tensorboard.tracked`), without the values that are not finite.
        values     : numbers by name. Tensors of one element are taken as numbers.
        """
        progress = {"step": step, "steps": steps, "epoch": epoch, "epochs": epochs, "rows": rows}
        position: dict[str, Any] = {k: int(v) for k, v in progress.items() if v is not None}
        numbers: dict[str, float | str] = {}
        wrong = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError) as error:
                wrong[name] = error
        if wrong:
            raise BadSetting(
                "world.log takes numbers: " + "; ".join(f"{name}={values[name]!r} is none" for name in wrong) + "."
            )
        counted = {}
        if histograms and self.rank == 0:
            from tritium.observe import histogram

            counted = {name: bins for name, array in histograms.items() if (bins := histogram.of(name, array))}
        self._control.tell(Logged(rank=self.rank, values=numbers or None, histograms=counted or None, **position))

    def note(self, text: str) -> None:
        """Show a line of text in the progress display, and record it in the events and the report.

        A text over 64 KiB is cut in the middle.
        """
        self._control.tell(Note(text=text))

    def shard(self, name: str = "train") -> Shard:
        """Return the shard of the DataFrame `data[name]`: the rows that this rank trains on. Waits for them."""
        shard = self._control.shard(name)
        from tritium.data.shard import in_use

        in_use.add(shard)
        return shard

    def store(self, name: str, chunks: bytes | Iterable[bytes]) -> None:
        """Write a file in the run directory, over the control connection, so that no shared disk is needed.

        name   : the path of the file, relative to the run directory.
        chunks : the file's bytes, or an iterable of bytes; chunks of up to 4 MiB keep memory flat.

        The file gets its name when its last chunk has arrived and size and checksum match, so it is never incomplete,
        also when this rank is killed and a later attempt stores it again. A full disk or a failing object store ends
        the run with StoreFailed. Raises BadSetting for a chunk that is not bytes.
        """
        for piece in cut(name, chunks):
            self._control.store(piece)

    def expect_file(self, name: str, size: int) -> None:
        """Raise StoreFailed now, instead of after a training, if a file of `size` bytes could not be stored.

        Only a Connect client that executors can't reach has a limit, as stored files return with Spark's results there.
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
    except (pickle.PicklingError, AttributeError, TypeError):  # Functions and local classes are pickled by value.
        return ship.pickle_from_rank(value)


_lock = threading.Lock()
_current: list[World] = []


def world() -> World:
    """Return the gang that this process is a rank of.

    Works in a rank of Tritium, under torchrun, under mpirun (Open MPI, MPICH), and in any other process, as a world of
    one.
    """
    with _lock:
        if _current:
            return _current[-1]
    return outside(os.environ)


def enter(world: World) -> None:
    """Let `tritium.world()` return `world` in this process."""
    with _lock:
        _current.append(world)


@contextmanager
def entered(world: World) -> Iterator[World]:
    """Let `tritium.world()` return `world` in this process, within the block."""
    enter(world)
    try:
        yield world
    finally:
        with _lock:
            _current.remove(world)


def outside(env: Mapping[str, str]) -> World:
    """Return the world of a process that Tritium did not start, from the variables of its launcher."""
    launcher, (rank, size, local_rank, local_size) = launched_by(env)
    host = socket.gethostname()
    torch = sys.modules.get("torch")
    device = f"cuda:{local_rank}" if torch is not None and torch.cuda.is_available() else "cpu"
    me = Peer(rank, host, "127.0.0.1", local_rank, device, os.getpid())
    peers = (me,) if size == 1 else ()
    return World(rank, size, local_rank, local_size, host, device, peers, "", Elsewhere(launcher, size))


def finish_checkpoints(world: World) -> None:
    """Wait for the last save, after the rank's function has returned. Raises the error of that save."""
    if "checkpoint" in vars(world):  # Without it no save can be open, and its module need not be imported.
        world.checkpoint.wait()


def wait_for_checkpoints(world: World) -> None:
    """Wait for the last save without raising its error, as another error is being raised."""
    if "checkpoint" in vars(world):
        world.checkpoint.wait_quietly()
