"""Start, feed and monitor a rank process, in a Spark task or in a thread on the driver (supervisor)."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from tritium import frameworks, ship
from tritium.accelerators import GPU
from tritium.errors import IncompleteShard, TritiumError, WireError
from tritium.frameworks.noise import noise
from tritium.frameworks.ports import reserved_port
from tritium.gang.failure import STACKS_BYTES, Failure
from tritium.gang.limits import LINE_BYTES
from tritium.gang.order import Order
from tritium.gang.supervisor.ending import Ending, GangEnded
from tritium.gang.supervisor.forked import start_rank
from tritium.gang.supervisor.gpus import Listing, executor
from tritium.gang.supervisor.monitor import Monitor
from tritium.gang.supervisor.native_stacks import find_spy, native_stacks
from tritium.gang.supervisor.output import RankOutput
from tritium.gang.supervisor.pmi import Pmi
from tritium.gang.supervisor.process_stats import spark_executor
from tritium.gang.supervisor.relay import Relay
from tritium.gang.supervisor.results import chunks
from tritium.gang.supervisor.spooler import Spooler
from tritium.shown import signal_name
from tritium.wire import Channel, Message, clip

if TYPE_CHECKING:
    from tritium.data.spool import Spool
    from tritium.host_cache import CacheEntry

ANSWER_SECONDS = 2.0
"""The limit for the coordinator's answer to a failure of the supervisor itself."""
_CALLS_SECONDS = 1.0
"""The limit for a rank to say how far it has come in its collectives."""
_NATIVE_SECONDS = 2.6
"""The time after a question for stacks until which py-spy is waited for: the coordinator waits for 3 s."""
_QUESTIONS = 5
"""How often the coordinator is asked for its time at the start."""
STATUS_SECONDS = 1.0
"""The time between two heartbeats with a rank's status."""


class Supervisor:
    """Feeds and monitors one rank.

    daemon : the pid of Spark's Python daemon, with which the supervisor ends; None: it is not in a Spark task.
    """

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
        self.ending = Ending(daemon)
        self._relay = Relay(order, self.ending, self)
        self._daemon = daemon
        self._started = False
        self._threads: list[threading.Thread] = []
        self._outputs: list[threading.Thread] = []
        self._from_rank: list[threading.Thread] = []
        self._spools: dict[str, Spool] = {}
        self._user_code: ship.Mount | None = None
        self._spooler: Spooler | None = None
        self._listing: Listing | None = None
        self._pmi: Pmi | None = None
        self._environment: CacheEntry | None = None

    def run(
        self,
        batches: Iterator[pa.RecordBatch],
        confirm: Callable[[], bool | None],
        address: tuple[str, int] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Start the rank, spool `batches`, wait for the end, and yield the rank's result as rows.

        confirm : tells, after `batches` has ended, whether an unsorted stream was complete.
        address : that of a coordinator on an executor; None: the coordinator is on the driver.

        Raises GangEnded, and errors of its own (a bad row, a full disk).
        """
        self.ending.by_driver = address is None and self._daemon is not None
        who = f"task {self.partition} (attempt {self.attempt}, launch {self.order.launch}) on {self.host}"
        self._channel = self._relay.reach(address, who)
        self._output = RankOutput(
            self._channel, noise({**os.environ, **self.order.env}, gpus=bool(self.order.accelerators))
        )
        port = reserved_port()
        result = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        self._monitor = Monitor(self._output)
        try:
            self._hello(port.getsockname()[1])  # First, so that the coordinator knows who reports a failure.
            try:
                self._open_spools()
                if self.order.packages is not None:
                    from tritium.gang.supervisor.packages import with_packages

                    self.order, self._environment = with_packages(self.order, self._channel)
                self._start(result)
            except Exception as error:  # The disk may be full, or the host have no memory or descriptors left.
                self._fail(self._failure_of(error))
                raise
            self._follow()
            self._receive(batches, confirm)
            self._await_end()
            yield from chunks(self.rank, "result", result)
        except GangEnded:
            self.ending.stay(self.partition, self.rank)
            raise
        finally:
            port.close()
            self._stop()
            result.close()
            self._output.close()
            self._monitor.close()

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
            spark_executor=spark_executor(),
        )

    def _open_spools(self) -> None:
        if self.order.plan:
            from tritium.data.spool import Spool

            self._spools = {name: Spool(fields) for name, fields in self.order.plan.items()}

    def _start(self, result: IO[bytes]) -> None:
        if self.order.user_code:
            self._user_code = ship.Mount(self.order.user_code)
        if self.order.framework is not None and self.order.framework.pmi:
            self._pmi = Pmi(self._channel, self.order.launch, self)
        ours, theirs = socket.socketpair()
        fds = [fd for spool in self._spools.values() for fd in spool.fds]
        fds += [self._pmi.fd] if self._pmi else []
        settings = {
            "control": theirs.fileno(),
            "result": result.fileno(),
            "result_dir": tempfile.gettempdir(),
            **self._monitor.settings,
            "framework": frameworks.to_json(self.order.framework),
            "gpus": bool(self.order.accelerators),
            "env_above_0": dict(self.order.env_above_0),
            "pmi": self._pmi.fd if self._pmi else None,
            "elastic": self.order.elastic,
            "trace": self.order.trace,
            "mounts": [self._user_code.path] if self._user_code else [],
            "path": ship.importable(),
            "imports": list(self.order.imports),
            "aliases": dict(self.order.aliases),
        }
        keep = (theirs.fileno(), result.fileno(), *self._monitor.fds, *fds)
        with theirs:
            try:
                self._process = start_rank(settings, order=self.order, daemon=self._daemon, keep=keep, cpus=self.cpus)
            except BaseException:
                ours.close()
                raise
        self._to_rank = Channel(ours)
        self._started = True  # From here on `_stop` must end the process.
        if self._pmi is not None:
            self._spawn(self._pmi.serve, "pmi")
        self._monitor.watch(self._process)
        if self.gpus and self.order.accelerators.resource == GPU:
            self._listing = Listing(self.gpus)
        if self.order.plan:
            self._spooler = Spooler(self.order, self._spools, self._channel, self._to_rank, self.ending.check)
        self._relay.connect(self._channel, self._to_rank, rows=self._spooler, pmi=self._pmi, gpus=self._listing)

    def _follow(self) -> None:
        follower = self._spawn(self._relay.follow_rank, "rank")
        self._outputs = [
            self._spawn(functools.partial(self._output.follow, pipe), "output")
            for pipe in (self._process.stdout, self._process.stderr)
        ]
        self._from_rank = [follower, *self._outputs]
        self._from_rank.append(self._spawn(self._follow_process, "process"))
        self._spawn(self._relay.follow_coordinator, "coordinator")
        self._spawn(self._send_heartbeats, "heartbeat")

    def _receive(self, batches: Iterator[pa.RecordBatch], confirm: Callable[[], bool | None]) -> None:
        if self._spooler is None:
            for _ in batches:
                pass
            return
        self._monitor.receives(self._spooler.rows)
        try:
            self._spooler.run(batches, confirm)
            self._monitor.receives(None)
        except GangEnded:
            raise
        except Exception as error:
            self._fail(self._failure_of(error))
            if isinstance(error, IncompleteShard):  # Spark knows the reason, and reports it when this task fails.
                raise
            self.ending.wait(lambda: False, ANSWER_SECONDS)
            self.ending.check()
            raise

    def _await_end(self) -> None:
        ending, limit = self.ending, self.order.stall_limit
        ending.wait(lambda: ending.all_finished)
        if not ending.wait(lambda: ending.exit_code is not None, limit.seconds if limit else None):
            self._end_exit_handlers()
        ending.wait(lambda: ending.exit_code is not None)
        ending.check()

    def _end_exit_handlers(self) -> None:
        """Report that this rank does not exit after its function has returned, and kill it unless on_stall="report"."""
        limit = self.order.stall_limit
        assert limit is not None
        text, facts = self._monitor.stacks()
        with self.ending.changed:
            if self.ending.exit_code is not None:  # It has exited meanwhile.
                return
            self.ending.outlasted = limit.end
        how = "was killed" if limit.end else "has not left"
        where = f"; it was {place}" if (place := facts["where"] or facts["why"]) else ""
        self._report_non_fatal(
            f"{how}: its exit handlers and threads had not ended after {limit.seconds:g} s (stall_timeout){where}",
            text,
        )
        if limit.end:
            self._process.kill_group()

    def _stop(self) -> None:
        self.ending.stopped.set()
        if self._started:
            self._process.kill_group()
        # The connection closes once the rank is gone and its last messages are passed on: a launch waits for no more.
        for thread in self._from_rank:
            thread.join(2.0)
        self._channel.close()
        if self._pmi is not None:
            self._pmi.close()
        if self._started:
            self._to_rank.close()
        for thread in self._threads:
            thread.join(2.0)
        if self._started:
            self._process.close()
        for opened in (self._listing, self._user_code, self._environment, *self._spools.values()):
            if opened is not None:
                opened.close()

    # ---- called by the relay

    def on_assigned(self, rank: int) -> None:
        """Take the rank that this task was assigned."""
        self.rank = rank

    def on_gang_ended(self, reason: str) -> None:
        """Kill the rank at once; the task's thread ends at its next check."""
        self.ending.close(reason)
        if self._started:
            self._process.kill_group()

    def on_stacks_wanted(self, number: int) -> None:
        """Send the stacks of the rank's threads, or why there are none."""
        self._spawn(functools.partial(self._send_stacks, number), "stacks")

    def on_signal(self, number: int) -> None:
        """Pass a signal that the driver was sent to the rank."""
        if self._started:
            self._process.send_signal(number)

    def on_rank_failed(self, message: Message) -> None:
        """Pass on an exception of the function, or of the code around it."""
        facts = {"host": self.host, "at": self._monitor.place()}
        self._fail(Failure.read({**message.fields, **facts}, message.blob))

    def on_rank_refused(self, error: TritiumError) -> None:
        """Fail: a message of the rank's is over the limit, or its MPI waits for a rank that has returned."""
        self._fail(self._failure_of(error, self._process.pid))

    def on_mpi_abort(self, code: int) -> None:
        """Fail with the exit code that the program gave MPI_Abort, and kill the rank."""
        facts: dict[str, Any] = {"host": self.host, "pid": self._process.pid, "at": self._monitor.place()}
        self._fail(Failure(how="exit", rank=self.rank, exit_code=code, text=f"it called MPI_Abort({code})", **facts))
        self._process.kill_group()

    # ---- threads

    def _spawn(self, target: Callable[[], None], what: str) -> threading.Thread:
        def run() -> None:
            try:
                target()
            except Exception as error:  # noqa: BLE001 - else the gang would wait for what this thread does
                self._fail(self._failure_of(error))

        thread = threading.Thread(target=run, name=f"tritium-{what}-{self.partition}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _follow_process(self) -> None:
        code = self._process.wait()
        self._output.end()
        follower = self._from_rank[0]
        self._relay.drain(follower.is_alive, follower.join)
        if code != 0 or not self.ending.rank_finished:
            self._on_exit(code)
        self.ending.set_exit(code)

    def _on_exit(self, code: int) -> None:
        """Report that the process was killed or left: a failure, unless every function has returned."""
        if self.ending.all_finished:  # Every result is complete, so this is no failure.
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit code {code}"
            if not self.ending.outlasted:
                self._report_non_fatal(how)
            return
        self._fail(self._monitor.failure(code, self.rank, self.host))

    def _send_heartbeats(self) -> None:
        """Send the rank's status about once a second; fail when Spark's daemon has ended."""
        seconds = self.order.stall_limit.look_seconds if self.order.stall_limit else STATUS_SECONDS
        if self.order.trace:
            self._relay.clock.ask(self._channel, _QUESTIONS)
        while not self.ending.stopped.wait(seconds):
            if self._daemon is not None and os.getppid() != self._daemon:
                # Spark does not notice that, and can no longer end this worker.
                text = f"Spark's Python daemon there (pid {self._daemon}), its supervisor's parent, was killed"
                self._fail(Failure(how="orphaned", rank=self.rank, host=self.host, pid=os.getpid(), text=text))
            with contextlib.suppress(WireError):  # The relay notices that the coordinator is gone.
                gpus = self._listing.used() if self._listing is not None else {}
                self._channel.send("status", **self._monitor.look(), **gpus)
            if self.order.trace:
                self._relay.clock.ask(self._channel, 1)

    def _send_stacks(self, number: int) -> None:
        deadline = time.monotonic() + _NATIVE_SECONDS
        text, facts = self._monitor.stacks()
        answer: dict[str, Any] = {}
        if not facts["why"]:  # Else its process does not answer, and py-spy would wait for one that can't be stopped.
            answer = self._relay.calls(number, _CALLS_SECONDS)
            if "problem" in answer:
                text = f"{text}\nThe collectives that it has called are not known: {answer['problem']}\n"
            bin_ = [str(self._environment.path / "bin")] if self._environment is not None else []
            if (spy := find_spy(bin_)) is not None:  # Last, as py-spy stops the process meanwhile.
                text = f"{text}\n{native_stacks(spy, self._process.pid, deadline - time.monotonic())}"
        with contextlib.suppress(WireError):
            self._channel.send("stacks", text.encode()[: 1 << 20], number=number, calls=answer.get("calls"), **facts)

    # ---- failures

    def _failure_of(self, error: Exception, pid: int | None = None) -> Failure:
        return Failure.of(error, self.rank, host=self.host, pid=pid or os.getpid())

    def _fail(self, failure: Failure) -> None:
        with self.ending.changed:
            if self.ending.failure is not None or self.ending.reason is not None:
                return
            self.ending.failure = failure
        if failure.how in ("exception", "exit", "signal"):
            for thread in self._outputs:
                thread.join(0.3)
            failure = failure.with_output(self._output.tail)
        try:
            self._channel.send("failed", failure.pickled, **failure.fields())
        except WireError:
            self.on_gang_ended("the coordinator is gone")

    def _report_non_fatal(self, text: str, stacks: str = "") -> None:
        facts = {"where": "", "type": "", "text": clip(text, LINE_BYTES), "traceback": clip(stacks, STACKS_BYTES)}
        with contextlib.suppress(WireError):
            self._channel.send("non_fatal_error", pid=self._process.pid, **facts)
