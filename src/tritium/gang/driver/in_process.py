"""`on="here"`: the only rank is this very process, for a debugger and for tests (driver).

It uses the same receiver, spool and shard as on a cluster, without the child process and the network.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tritium.accelerators import Accelerators
from tritium.data.decode import decoders
from tritium.errors import BadSetting
from tritium.events import Event, GangFormed, RankEnded, made
from tritium.gang.driver.attempt import Attempt, prepared
from tritium.gang.driver.rank_environment import surrounded
from tritium.gang.limits import GRACE_SECONDS
from tritium.gang.rank.peers import Device, Peer
from tritium.gang.rank.progress_page import ProgressWriter
from tritium.gang.rank.world import World, entered, finish_checkpoints, wait_for_checkpoints
from tritium.gang.supervisor.gpus import gpus_here

if TYPE_CHECKING:
    from tritium.data.shard import Shard
    from tritium.gang.driver.recorder import Recorder
    from tritium.observe.stored import Piece
    from tritium.tls import Certificate


_one_at_a_time = threading.RLock()
_WAKE_SECONDS = 1.0
"""The time between two checks whether a run that waits for another one was cancelled."""


class InProcess:
    """Runs rank 0 of 1 in this process. Exceptions of the function are raised as they are, for a debugger."""

    def __init__(self, attempt: Attempt) -> None:
        addresses, _ = gpus_here(attempt.gang)
        self._devices = tuple(map(Device, Accelerators.of(attempt.gang).of_rank(addresses, 0)))
        self._attempt = attempt
        self._lock = threading.Lock()
        self._thread: int | None = None
        """The thread in which the function runs."""

    def start(self) -> None:
        """Do nothing: `wait` calls the function."""

    def wait(self) -> list[Any]:
        """Call the function as rank 0 of 1, and return its result in a list.

        Environment and world are those of the process, so a second run waits until the first has ended.
        """
        attempt = self._attempt
        while not _one_at_a_time.acquire(timeout=_WAKE_SECONDS):
            attempt.cancellation.check()
        with ExitStack() as stack:
            stack.callback(_one_at_a_time.release)
            control = HereControl(attempt.recorder, _shards(attempt, stack), attempt.deadline)
            device = "cuda:0" if attempt.gang.gpus else "cpu"
            me = Peer(0, socket.gethostname(), "127.0.0.1", 0, device, os.getpid(), self._devices)
            world = World(0, 1, 0, 1, me.host, device, (me,), attempt.run_id, control)
            stack.enter_context(entered(world))
            stack.callback(wait_for_checkpoints, world)
            stack.enter_context(surrounded(attempt.gang, world))
            attempt.recorder.event(GangFormed(peers=[asdict(me)]))
            with self._interruptible():
                result = attempt.function(*attempt.args, **attempt.kwargs)
                finish_checkpoints(world)
            attempt.recorder.event(RankEnded(rank=0))
            return [result]

    def signal(self, number: int) -> bool:
        """Return False: this process itself has received it."""
        return False

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the function, when the call into C that it may be in has ended."""
        with self._lock:
            if self._thread is not None:
                _raise_in(self._thread, KeyboardInterrupt)

    def cancel(self) -> None:
        """Do nothing: `wait` has cleaned up."""

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        try:
            try:
                with self._lock:
                    self._thread = threading.get_ident()
                self._attempt.cancellation.check()
                yield
            finally:
                with self._lock:
                    thread, self._thread = self._thread, None
                    if thread is not None:
                        _raise_in(thread, None)  # What has not been raised yet must not be, outside the function.
        except KeyboardInterrupt:
            self._attempt.cancellation.check()
            raise


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def _shards(attempt: Attempt, stack: ExitStack) -> dict[str, Shard]:
    if not attempt.data:
        return {}
    from tritium.data.receiver import Receiver
    from tritium.data.shard import Shard
    from tritium.data.spool import Spool
    from tritium.data.steps import Feed, Watermark
    from tritium.data.tables import Tables
    from tritium.gang.coordinator.rows import received, skipped_notes
    from tritium.gang.supervisor.spooler import plain_fingerprint

    tables = Tables(attempt.data, 1)
    plan = tables.plan
    spools = {name: stack.enter_context(closing(Spool(fields))) for name, fields in plan.items()}
    receiver = Receiver(plan, spools, sorted=True)
    for batch in tables.batches(0):
        receiver.take(batch)
    receipt = receiver.finish(confirmed=True)
    prints = plain_fingerprint(receipt.fingerprint)
    told = {0: {"rows": receipt.rows, "fingerprint": prints, "skipped": receipt.skipped, "first": receipt.first}}
    whole = received(told)
    attempt.recorder.event(whole)
    for text in skipped_notes(whole, told):
        attempt.recorder.note(text)
    shards = {}
    for name, fields in plan.items():
        feed = Feed(fingerprint=whole.fingerprint.get(name))
        feed.publish(Watermark(receipt.rows[name], {0: receipt.rows[name]}, 1))
        shards[name] = stack.enter_context(
            closing(
                Shard(
                    name,
                    receipt.columns[name],
                    fields,
                    index=0,
                    size=1,
                    feed=feed,
                    decode=decoders(attempt.data[name]),
                    tensors=attempt.tensors,
                    prepared=prepared(attempt.data[name].shuffle),
                    on_epoch_end=functools.partial(_note, attempt.recorder, name),
                    on_message=attempt.recorder.note,
                )
            )
        )
    return shards


def _note(recorder: Recorder, name: str, counts: Mapping[str, Any]) -> None:
    recorder.event(made("counts", {**counts, "rank": 0, "name": name}))


class HereControl:
    """The control of a gang of one in this process; see `rank.peers.Control`."""

    elastic = could_be_more = False
    store_limit: int | None = None
    certificate: Certificate | None = None

    def __init__(self, recorder: Recorder, shards: Mapping[str, Shard], deadline: float) -> None:
        self.run_dir = recorder.run_dir
        self._deadline = deadline
        self._recorder = recorder
        self._shards = shards
        self.progress = ProgressWriter()

    @property
    def notice(self) -> float | None:
        """As of `checkpoint.control.Control`: this gang is announced its end when `max_runtime` has passed."""
        return self._deadline + GRACE_SECONDS if time.monotonic() > self._deadline else None

    def all_gather(self, operation: str, value: bytes, tag: str = "main") -> list[bytes]:
        """Return `value`: there is no other rank."""
        return [value]

    def all_gather_async(self, operation: str, value: bytes, tag: str = "main") -> Callable[[], list[bytes]]:
        """Return a function that gives `[value]`."""
        return lambda: [value]

    def tell(self, event: Event) -> None:
        """Record an event."""
        self._recorder.event(event)

    def store(self, piece: Piece) -> None:
        """Store a piece of a file in the run directory."""
        self._recorder.store(piece)

    def shard(self, name: str) -> Shard:
        """Return the shard `name`, which has all rows. Raises BadSetting for an unknown name."""
        if name not in self._shards:
            known = ", ".join(map(repr, self._shards)) or "none: launch(…, data={…}) names them"
            raise BadSetting(f"There is no shard {name!r}. There are: {known}.")
        return self._shards[name]

    def confirm_rows(self) -> None:
        """Return at once: all rows are there before the function is called."""
