"""The Spark task's own work: start a rank process, feed it and watch it (supervisor).

`supervise` is what `mapInArrow` calls on an executor; `Supervisor.run` is the same for a thread on the driver.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import signal
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from tritium import ship
from tritium.errors import IncompleteShard, TooLarge, TritiumError, WireError
from tritium.gang.control.address import family_of, unreachable
from tritium.gang.control.client import Line, Refused
from tritium.gang.coordinator.stalls import Patience
from tritium.gang.failure import STACKS_BYTES, Failure, signal_name
from tritium.gang.limits import LINE_BYTES, as_shown
from tritium.gang.supervisor.gpus import Listing, executor
from tritium.gang.supervisor.monitor import Watcher
from tritium.gang.supervisor.process import start_rank
from tritium.gang.supervisor.results import chunks
from tritium.gang.supervisor.rows import Intake
from tritium.wire import CHUNK, Channel, Message, clip

if TYPE_CHECKING:
    from tritium.data.schema import Field
    from tritium.data.spool import Spool

CONNECT_SECONDS = 10.0
LONGEST_LINE = 1 << 16  # a longer one is passed on in pieces
SMALL = 1 << 14  # bytes that a socket with room takes without waiting for its reader
TAIL = 20  # lines of a rank's output that travel with its failure
ANSWER_SECONDS = 2.0  # how long a failure of its own may take to the coordinator and back
STAY_SECONDS = 5.0  # how long a driver may take to cancel the Spark job
_TOLD = ("exception", "error", "exit", "signal", "stalled")  # what Spark does not see by itself
PULSE_SECONDS = 1.0  # how often the coordinator hears how a rank stands


@dataclass(frozen=True, kw_only=True)
class Order:
    """What every supervisor of a run is told, by value."""

    launch: str
    run_id: str
    size: int
    address: tuple[str, int]
    secret: bytes
    job: bytes
    env: Mapping[str, str]
    cpus: int | None = None
    gpus: int = 0
    framework: str | None = None
    plan: Mapping[str, tuple[Field, ...]] = field(default_factory=dict)
    sorted: bool = True
    streams: bool = False
    prepared: Mapping[str, str | bool] = field(default_factory=dict)
    user_code: bytes = b""
    elastic: bool = False
    trace: bool = False
    far_client: bool = False
    far_limit: int = 0  # bytes of all results together, where the coordinator's notes travel with them; 0: any
    patience: Patience | None = None
    run_dir: str = ""


class GangEnded(TritiumError):
    """The coordinator has ended this gang; the text says why."""


def supervise(payload: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in Spark's Python worker, once a task of the gang."""
    from pyspark import TaskContext

    from tritium.data.receiver import stream_is_complete

    order: Order = pickle.loads(payload)
    context = TaskContext.get()
    assert context is not None
    resources = context.resources()
    gpus = tuple(resources["gpu"].addresses)[: order.gpus] if order.gpus and "gpu" in resources else ()
    cpus = order.cpus or context.cpus()
    ids = {"partition": context.partitionId(), "attempt": context.taskAttemptId()}
    supervisor = Supervisor(order, **ids, gpus=gpus, cpus=cpus, daemon=os.getppid())
    try:
        if order.far_client:
            from tritium.gang.coordinator.on_executor import supervise_far

            yield from supervise_far(supervisor, context, batches, stream_is_complete)
        else:
            yield from supervisor.run(batches, stream_is_complete)
    except GangEnded:
        if not supervisor.dismissed:
            raise
        # The driver knows, and says why: an exception here would be 40 lines of Spark's log for each rank.


class Supervisor:
    """Feeds and watches one rank. `daemon` is the process without which it has no business to live, if any."""

    def __init__(
        self,
        order: Order,
        *,
        partition: int,
        attempt: int,
        gpus: tuple[str, ...],
        cpus: int,
        daemon: int | None = None,
    ) -> None:
        self.order = order
        self.partition = partition
        self.attempt = attempt
        self.gpus = gpus
        self.cpus = cpus
        self.rank = partition
        self.host = socket.gethostname()
        self.failure: Failure | None = None
        self._daemon = daemon
        self._changed = threading.Condition()
        self._end: str | None = None
        self._all_finished = False
        self._rank_finished = False
        self._exit: int | None = None
        self._outlasted = False  # the rank was killed because its exit handlers did not end
        self._started = False
        self._passing, self._passed = False, 0  # whether a message of the rank's is being passed on; how many were
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._threads: list[threading.Thread] = []
        self._outputs: list[threading.Thread] = []
        self._from_rank: list[threading.Thread] = []
        self._spools: dict[str, Spool] = {}
        self._user_code: ship.Mount | None = None
        self._intake: Intake | None = None
        self._over_event = threading.Event()
        self._listing: Listing | None = None
        self._ends = 0
        self._by_driver = False
        self._may_leave = threading.Event()

    # ---- the whole of it

    def run(
        self,
        batches: Iterator[pa.RecordBatch],
        confirm: Callable[[], bool | None],
        address: tuple[str, int] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Start the rank, spool `batches`, wait for the end; yields the rank's result.

        `confirm` tells, once `batches` has ended, whether an unsorted stream was complete.
        """
        self._by_driver = address is None and self._daemon is not None
        who = f"task {self.partition} (attempt {self.attempt}, launch {self.order.launch}) on {self.host}"
        self._channel = self._reach(address or self.order.address, who)
        placeholder = socket.socket(family_of(self._channel.addresses[0]))
        result = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        self._watcher = Watcher()
        try:
            # Bound but never listening: the port stays ours until the framework binds over it (SO_REUSEADDR).
            placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            placeholder.bind((self._channel.addresses[0], 0))
            self._hello(placeholder.getsockname()[1])  # first, so that the coordinator knows who tells of a failure
            try:
                self._open_spools()
                self._start(result)
            except Exception as error:  # a full disk, too many open files, no memory for a process
                self._fail(Failure.of(error, self.rank, host=self.host, pid=os.getpid()))
                raise
            self._follow()
            self._receive(batches, confirm)
            self._await_end()
            yield from chunks(self.rank, "result", result)
        except GangEnded:
            self._stay()
            raise
        finally:
            placeholder.close()
            self._stop()
            result.close()
            self._watcher.close()

    def _reach(self, address: tuple[str, int], who: str) -> Line:
        try:
            return Line(address, self.order.secret, who, CONNECT_SECONDS, self._at_once)
        except Refused:
            raise
        except WireError as error:
            raise WireError(unreachable(self.host, address, CONNECT_SECONDS, error)) from error

    def _open_spools(self) -> None:
        if self.order.plan:
            from tritium.data.spool import Spool

            self._spools = {name: Spool(fields) for name, fields in self.order.plan.items()}

    def _start(self, result: IO[bytes]) -> None:
        if self.order.user_code:
            self._user_code = ship.Mount(self.order.user_code)
        ours, theirs = socket.socketpair()
        fds = [fd for spool in self._spools.values() for fd in spool.fds]
        settings = {
            "control": theirs.fileno(),
            "result": result.fileno(),
            **self._watcher.settings,
            "parent": os.getpid(),
            "framework": self.order.framework,
            "elastic": self.order.elastic,
            "trace": self.order.trace,
            "mounts": [self._user_code.path] if self._user_code else [],
            "path": ship.importable(),
        }
        keep = (theirs.fileno(), result.fileno(), *self._watcher.fds, *fds)
        self._process = start_rank(settings, keep=keep, env=self.order.env, cpus=self.cpus)
        self._to_rank = Channel(ours)
        self._started = True  # whatever comes now, `_stop` ends the process
        theirs.close()
        self._watcher.watch(self._process)
        if self.gpus:
            self._listing = Listing()
        if self.order.plan:
            self._intake = Intake(self.order, self._spools, self._channel, self._to_rank, self._check)

    def _follow(self) -> None:
        follower = self._spawn(self._follow_rank, "rank")
        self._outputs = [
            self._spawn(functools.partial(self._follow_output, pipe), "output")
            for pipe in (self._process.stdout, self._process.stderr)
        ]
        self._from_rank = [follower, *self._outputs]
        self._spawn(self._follow_process, "process")
        self._spawn(self._follow_coordinator, "coordinator")
        self._spawn(self._tell_pulse, "pulse")

    def _hello(self, port: int) -> None:
        self._channel.send(
            "hello",
            launch=self.order.launch,
            partition=self.partition,
            attempt=self.attempt,
            host=self.host,
            address=self._channel.addresses[0],
            port=port,
            pid=os.getpid(),
            gpus=list(self.gpus),
            executor=executor(),
        )

    def _receive(self, batches: Iterator[pa.RecordBatch], confirm: Callable[[], bool | None]) -> None:
        if self._intake is None:
            for _ in batches:
                pass
            return
        self._watcher.receives(self._intake.rows)
        try:
            self._intake.run(batches, confirm)
            self._watcher.receives(None)
        except GangEnded:
            raise
        except Exception as error:
            self._fail(Failure.of(error, self.rank, host=self.host, pid=os.getpid()))
            if isinstance(error, IncompleteShard):  # of that Spark knows more, and says it when this task fails
                raise
            with self._changed:
                self._changed.wait_for(lambda: self._end is not None, ANSWER_SECONDS)
            self._check()
            raise

    def _await_end(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._all_finished)
            seconds = self.order.patience.timeout if self.order.patience else None
            left = self._changed.wait_for(lambda: self._end is not None or self._exit is not None, seconds)
        if not left:
            self._outlast()
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._exit is not None)
        self._check()

    def _outlast(self) -> None:
        """Every result is there, and this rank's exit handlers, or threads that are no daemons, do not end."""
        patience = self.order.patience
        assert patience is not None
        text, facts = self._watcher.stacks()
        place = facts["where"] or facts["why"]
        with self._changed:
            if self._exit is not None:  # meanwhile they have
                return
            self._outlasted = patience.end
        how = "was killed" if patience.end else "has not left"
        where = f"; it was {place}" if place else ""
        self._aside(
            f"{how}: its exit handlers and threads had not ended after {patience.timeout:g} s (stall_timeout){where}",
            text,
        )
        if patience.end:
            self._process.kill_group()

    def _aside(self, text: str, stacks: str = "") -> None:
        facts = {"where": "", "type": "", "text": clip(text, LINE_BYTES), "traceback": clip(stacks, STACKS_BYTES)}
        with contextlib.suppress(WireError):
            self._channel.send("aside", pid=self._process.pid, **facts)

    def _check(self) -> None:
        if self._end is not None:
            raise GangEnded(self._story())

    @property
    def dismissed(self) -> bool:
        """Whether the driver has ended this gang, and lives on to say why; and Spark can use this worker again."""
        return self._ends > 0 and self._by_driver and os.getppid() == self._daemon

    def _stay(self) -> None:
        """The supervisor of the rank that failed, or of the first rank when none did, waits until the driver has
        cancelled the Spark job: Spark's UI shows it then as failed, with the reason, and Spark's log has one line.
        """
        if self.failure is None:
            stays = self.dismissed and self.partition == 0
        else:
            stays = self.dismissed and self.failure.rank == self.rank and self.failure.how in _TOLD
        if stays:
            self._may_leave.wait(STAY_SECONDS)

    def _story(self) -> str:
        if self.failure is None:
            return f"This gang was ended: {self._end}"
        return "\n".join([self.failure.headline(), "", self.failure.traceback]).rstrip()

    def _stop(self) -> None:
        self._over_event.set()
        if self._started:
            self._process.kill_group()
        for thread in self._from_rank:  # what the rank still said is passed on before the connection closes
            thread.join(2.0)
        self._channel.close()
        if self._started:
            self._to_rank.close()
        for thread in self._threads:
            thread.join(2.0)
        if self._listing is not None:
            self._listing.close()
        if self._started:
            self._process.close()
        for spool in self._spools.values():
            spool.close()
        if self._user_code:
            self._user_code.close()

    # ---- threads

    def _spawn(self, target: Callable[[], None], what: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"tritium-{what}-{self.partition}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _follow_coordinator(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._obey(message)
        self._may_leave.set()
        if not self._all_finished and self._end is None:
            self._over(f"the coordinator is gone (did the driver end?): {self._channel.reason}")

    def _at_once(self, message: Message, idle: bool) -> bool:
        """What must not wait behind a rank that does not listen, and what should not wait for another thread."""
        if message.kind in ("end", "stacks"):
            now = self._started
        else:
            quick = idle and message.kind in ("gathered", "mark") and len(message.blob) < SMALL
            now = quick and self._to_rank.has_room
        if now:
            self._obey(message)
        return now

    def _obey(self, message: Message) -> None:
        try:
            self._do(message)
        except (WireError, ValueError, TypeError, KeyError) as error:
            self._over(f"the coordinator's messages can't be read: {error}")

    def _do(self, message: Message) -> None:
        if message.kind == "end":
            if message.fields.get("failure"):
                self.failure = Failure.read(message["failure"], message.blob)
            self._ends += 1
            if message.fields.get("refused"):  # a second copy of a task: Spark must not take it for the one that ended
                self._by_driver = False
            self._over(message["reason"])
            if self._ends > 1:
                self._may_leave.set()
            return
        if message.kind == "assign":
            self.rank = message["rank"]
            about = {"run_dir": self.order.run_dir}
            for start in range(0, len(self.order.job), CHUNK):  # in pieces: arguments may be larger than a message
                self._tell_rank(Message("job", about, self.order.job[start : start + CHUNK]))
        elif message.kind == "stacks":
            self._spawn(functools.partial(self._tell_stacks, message["number"]), "stacks")
            return
        elif message.kind == "spooled":
            assert self._intake is not None
            for name, shapes in json.loads(message.blob).items():
                self._intake.announce(name, shapes)
            return
        elif message.kind == "finished":
            with self._changed:
                self._all_finished = True
                self._changed.notify_all()
        self._tell_rank(message)

    def _tell_rank(self, message: Message) -> None:
        try:
            self._to_rank.pass_on(message)
        except WireError:  # the rank has ended; `_follow_process` says how
            return

    def _follow_rank(self) -> None:
        while (message := self._to_rank.receive()) is not None:
            if message.kind == "failed":
                facts = {"host": self.host, "at": self._watcher.place()}
                failure = Failure.read({**message.fields, **facts}, message.blob)
                self._fail(failure)
                continue
            if message.kind == "ready":
                message.fields["gpus"] = self._listing.uuids() if self._listing else {}
                if self._intake is not None:
                    self._intake.ready.set()
            if message.kind == "finished":
                with self._changed:
                    self._rank_finished = True
            try:
                self._passing = True
                self._channel.pass_on(message)
            except TooLarge as error:
                self._fail(Failure.of(error, self.rank, host=self.host, pid=self._process.pid))
                return
            except WireError:  # `_follow_coordinator` says that it is gone
                return
            finally:
                self._passed += 1
                self._passing = False

    def _follow_output(self, pipe: IO[bytes] | None) -> None:
        """Pass on whole lines, so that stdout and stderr don't mix within one, and no character is cut in two."""
        assert pipe is not None
        rest = b""
        while data := os.read(pipe.fileno(), 1 << 16):
            text = rest + data
            end = text.rfind(b"\n") + 1 or (len(text) if len(text) > LONGEST_LINE else 0)
            self._say(text[:end])
            rest = text[end:]
        self._say(rest)

    def _say(self, text: bytes) -> None:
        if not text:
            return
        self._watcher.output += 1
        self._tail.extend(as_shown(line) for line in text.split(b"\n") if line.strip())
        with contextlib.suppress(WireError):  # keep reading all the same: the rank must not block on a full pipe
            self._channel.send("output", text)

    def _follow_process(self) -> None:
        code = self._process.wait()
        self._hear_out(self._from_rank[0])
        if code != 0 or not self._rank_finished:
            self._tell_end(code)
        with self._changed:
            self._exit = code
            self._changed.notify_all()

    def _hear_out(self, follower: threading.Thread) -> None:
        """Wait until all that the rank said before its end is passed on, however slow the way to the driver is.

        A process that the rank has started may hold its end of the socket open: a second without a word is enough.
        """
        passed = -1
        while follower.is_alive() and (self._passing or self._passed != passed) and not self._over_event.is_set():
            passed = self._passed
            follower.join(1.0)

    def _tell_end(self, code: int) -> None:
        """Its process was killed, or left by itself: a failure, or too late to be one."""
        if self._all_finished:  # every result is there: whatever ended it can't change them
            if not self._outlasted:
                self._aside(f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit code {code}")
            return
        facts: dict[str, Any] = {"rank": self.rank, "host": self.host, "pid": self._process.pid}
        facts["at"] = self._watcher.place()
        if code >= 0:
            self._fail(Failure(how="exit", exit_code=code, **facts))
            return
        if code == -signal.SIGKILL:
            facts["memory"] = self._watcher.memory()
        self._fail(Failure(how="signal", signal=signal_name(-code), exit_code=code, **facts))

    def _tell_pulse(self) -> None:
        """About once a second, how the rank stands."""
        seconds = self.order.patience.look_seconds if self.order.patience else PULSE_SECONDS
        while not self._over_event.wait(seconds):
            if self._daemon is not None and os.getppid() != self._daemon:
                # Spark does not notice, and could not end this worker any more.
                text = f"Spark's Python daemon there (pid {self._daemon}), its supervisor's parent, was killed"
                self._fail(Failure(how="orphaned", rank=self.rank, host=self.host, pid=os.getpid(), text=text))
            with contextlib.suppress(WireError):  # `_follow_coordinator` sees that it is gone
                self._channel.send("pulse", **self._watcher.look())

    def _tell_stacks(self, number: int) -> None:
        """The stacks of the rank's threads, or why there are none."""
        text, facts = self._watcher.stacks()
        with contextlib.suppress(WireError):
            self._channel.send("stacks", text.encode()[: 1 << 20], number=number, **facts)

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            if self.failure is not None or self._end is not None:
                return
            self.failure = failure
        if failure.how in ("exception", "exit", "signal"):
            for thread in self._outputs:
                thread.join(0.3)
            failure = Failure.read({**failure.fields(), "log": [*failure.log, *self._tail]}, failure.pickled)
        try:
            self._channel.send("failed", failure.pickled, **failure.fields())
        except WireError:
            self._over("the coordinator is gone")

    def _over(self, reason: str) -> None:
        """The gang has ended: the rank is killed at once; the task ends as soon as its thread can look up."""
        with self._changed:
            if self._end is None and not (self._all_finished and self._exit is not None):
                self._end = reason
            self._changed.notify_all()
        self._process.kill_group()
