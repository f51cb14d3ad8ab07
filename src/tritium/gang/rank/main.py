"""The process in which the user's function runs (rank).

It starts before the gang is complete and imports the framework meanwhile; everything else it learns from its
supervisor, over one inherited socket.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tritium import ship
from tritium.errors import BadSetting, ResultError, TooLarge, TritiumError, WireError, WrongVersion
from tritium.frameworks import mpi
from tritium.frameworks import torch as pytorch
from tritium.gang.control.address import interface_v6
from tritium.gang.failure import Failure, Regroup
from tritium.gang.limits import check_value, short, too_much_to_log
from tritium.gang.rank.heartbeat import Pulse
from tritium.gang.rank.world import World, entered, peers_of
from tritium.wire import Channel, Message

if TYPE_CHECKING:
    from tritium.data.shard import Shard
    from tritium.data.watermark import Feed
    from tritium.observe.stored import Piece
    from tritium.observe.trace import Section, Trace

_PR_SET_PDEATHSIG = 1


def main(argument: str) -> None:
    """Everything a rank process does, from its first line to its exit code."""
    settings = json.loads(argument)
    _die_with(settings["parent"])
    os.set_inheritable(settings["control"], False)
    channel = Channel(socket.socket(fileno=settings["control"]))
    _answer_with_stacks(settings)
    ship.import_from(settings["path"])
    pulse = Pulse.on(settings["pulse"])
    trace = tracing() if settings["trace"] else None
    control = RankControl(channel, elastic=settings["elastic"], pulse=pulse, trace=trace)
    try:
        pytorch.prepare()
        if settings["framework"]:
            control.pulse.enter(f"importing {settings['framework']}")
        _import_framework(settings["framework"])
        control.pulse.enter("waiting for the other ranks to start", "wait")
        channel.send("ready", pid=os.getpid())
        control.listen()
        with entered(control.join()) as world:
            prepare_environment(world, control.assignment)
            if world.size > 1:
                mpi.refuse(world.size)
            _tell_of_threads(control)
            _run(control, world, settings)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
        _report(channel, control, error)
    control.pulse.enter("returned", "wait")
    control.await_all()
    control.pulse.enter("leaving")
    _leave(control)


def _run(control: RankControl, world: World, settings: Mapping[str, Any]) -> None:
    sys.path[:0] = settings["mounts"]
    control.pulse.enter("loading the function")
    function, args, kwargs, control.decoders, control.tensors = pickle.loads(control.take_job())
    control.pulse.enter("no step reported")
    result = function(*args, **kwargs)
    _finish_checkpoints(world)
    if control.trace is not None and (found := control.trace.report()) is not None:
        control.tell("trace", **found)
    control.pulse.enter("returning its result")
    with os.fdopen(settings["result"], "wb") as file:
        try:
            file.write(ship.pickle(result))
        except Exception as error:
            raise ResultError(
                f"The result of rank {world.rank}, a {type(result).__qualname__}, can't be pickled: {error}. "
                "Return plain data, or store large things with world.store().",
                rank=world.rank,
            ) from error
        size = file.tell()
    _flush()
    control.send("finished", bytes=size)


def tracing() -> Trace:
    """A trace that hooks into torch once there are batches."""
    from tritium.frameworks.torch_trace import hook
    from tritium.observe.trace import Trace

    trace = Trace()
    trace.on_first_batch = functools.partial(hook, trace)
    return trace


def _finish_checkpoints(world: World) -> None:
    if "checkpoint" in vars(world):  # not imported in vain
        from tritium.gang.rank.checkpoints import finish

        finish(world)


def _report(channel: Channel, control: RankControl, error: BaseException) -> None:
    rank = control.assignment.get("rank", -1)
    if isinstance(error, WireError):  # the supervisor is gone, and with it everyone to tell
        os._exit(1)
    trimmed = error.__traceback__
    while trimmed is not None and trimmed.tb_frame.f_globals.get("__name__") == __name__:
        trimmed = trimmed.tb_next
    if trimmed is not None:
        error = error.with_traceback(trimmed)
    if isinstance(error, Regroup):
        channel.send("regroup")
        control.await_all()
    failure = Failure.of(error, rank, pid=os.getpid())
    if isinstance(error, SystemExit):
        failure = replace(failure, how="exit", text=f"it called sys.exit({error.code!r:.200}) instead of returning")
    try:
        _flush()
        channel.send("failed", failure.pickled, **failure.fields())
    finally:
        os._exit(1)  # not sys.exit: a thread or an exit handler of the user's could keep a failed rank alive


def _leave(control: RankControl) -> None:
    """End as Python does, but for the last act, in which it takes its modules apart: see `keep_groups`."""
    say, show = sys.unraisablehook, sys.excepthook

    def unraisable(problem: sys.UnraisableHookArgs) -> None:
        say(problem)
        if "atexit callback" in (problem.err_msg or ""):  # not a destructor's
            control.aside("an exit handler", problem.exc_value or problem.exc_type())

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        control.aside("an exit handler", error)

    sys.unraisablehook, sys.excepthook = unraisable, uncaught  # weakref.finalize calls the latter
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # an idle pool's threads end by what this calls first
    except Exception as error:  # noqa: BLE001 - as Python, which goes on to the exit handlers
        uncaught(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    _flush()
    os._exit(0)


def _tell_of_threads(control: RankControl) -> None:
    """An exception that ends a thread of the user's ends nothing else, as in any Python; but the driver hears of it."""
    show = threading.excepthook

    def tell(problem: threading.ExceptHookArgs) -> None:
        show(problem)
        if not issubclass(problem.exc_type, SystemExit):
            name = problem.thread.name if problem.thread is not None else "?"
            control.aside(f"its thread {name!r}", problem.exc_value or problem.exc_type())

    threading.excepthook = tell


def _flush() -> None:
    """What was printed leaves this process; streams that the user has closed or replaced are the user's own matter."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _die_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends (Linux); elsewhere the socket's end does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer_with_stacks(settings: Mapping[str, Any]) -> None:
    """A signal writes the stacks of all threads to the supervisor's file; a crash writes its own to stderr."""
    faulthandler.enable(all_threads=False)  # the last lines of output travel with a failure: the one that crashed
    for name in ("stacks", "pulse"):
        os.set_inheritable(settings[name], False)
    faulthandler.register(settings["signal"], file=settings["stacks"], all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {settings["signal"]})


def _import_framework(framework: str | None) -> None:
    if framework is None:
        return
    try:
        importlib.import_module(f"tritium.frameworks.{framework}").load()
    except ImportError as error:
        raise WrongVersion(
            f"{framework} can't be imported on {socket.gethostname()} by {sys.executable}: {error}. "
            f"Install it there: {sys.executable} -m pip install {framework}",
            framework=framework,
        ) from error


def prepare_environment(world: World, assignment: Mapping[str, Any]) -> None:
    """What torchrun would set, so that `torch.distributed.init_process_group()` works as it stands."""
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.local_size),
        MASTER_ADDR=str(assignment["master_address"]),
        MASTER_PORT=str(assignment["master_port"]),
    )
    if assignment["visible_gpus"]:
        if "CUDA_VISIBLE_DEVICES" not in os.environ:  # addresses are nvidia-smi's, in whose order CUDA counts only so
            os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(assignment["visible_gpus"])
    interface = _interface(world.peers[world.rank].address)
    if interface is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


def _interface(address: str) -> str | None:
    """The network interface that has `address`: the one that routes to the driver, whatever the host's name says."""
    if sys.platform != "linux":
        return None
    if ":" in address:
        return interface_v6(address)
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class RankControl:
    """The rank's end of the control socket: one thread listens, any thread asks."""

    def __init__(
        self,
        channel: Channel,
        *,
        elastic: bool = False,
        pulse: Pulse | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.run_dir = ""  # comes with the job: on the command line, ps would show the keys that a URL may hold
        self.elastic = elastic
        self.could_be_more = False
        self.store_limit: int | None = None
        self._channel = channel
        self.pulse = pulse or Pulse()
        self.trace = trace
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._gathered: dict[tuple[str, int], Message] = {}
        self._meetings: dict[str, int] = {}
        self._feeds: dict[str, Feed] = {}
        self._spools: dict[str, Message] = {}
        self._shards: dict[str, Shard] = {}
        self._all_finished = False
        self.assignment: dict[str, Any] = {}
        self._peers = b""
        self._pieces: list[bytes] = []
        self.decoders: Mapping[str, Mapping[str, Any]] = {}
        self.tensors = False

    def take_job(self) -> bytes:
        """The user's function with everything that goes with it; once."""
        job, self._pieces = b"".join(self._pieces), []
        return job

    def listen(self) -> None:
        """Begin to receive."""
        self._thread = threading.Thread(target=self._listen, name="tritium-control", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            with self._changed:
                self._take(message)
                self._changed.notify_all()
        os._exit(1)  # the supervisor is gone; where the kernel does not end this process, this does

    def _take(self, message: Message) -> None:
        if message.kind == "job":
            self._pieces.append(message.blob)
            self.run_dir = str(message.fields.get("run_dir", ""))
        elif message.kind == "assign":
            self.assignment, self._peers = message.fields, message.blob
        elif message.kind == "gathered":
            self._gathered[message["lane"], message["number"]] = message
        elif message.kind == "spool":
            self._spools[message["name"]] = message
        elif message.kind == "mark":
            from tritium.data.watermark import Watermark

            ended = {int(rank): int(rows) for rank, rows in message["ended"]}
            self._feed(message["name"]).publish(Watermark(message["rows"], ended, self.assignment["size"]))
        elif message.kind == "more":
            self.could_be_more = True
        elif message.kind == "fingerprint":
            for name, table in json.loads(message.blob).items():
                self._feed(name).fingerprint = table
        elif message.kind == "finished":
            self._all_finished = True

    def _feed(self, name: str) -> Feed:
        from tritium.data.watermark import Feed

        if name not in self._feeds:
            self._feeds[name] = Feed(functools.partial(self._awaits_rows, name))
        return self._feeds[name]

    @contextmanager
    def _awaits_rows(self, name: str) -> Iterator[None]:
        with self.pulse.within(f"waiting for rows of {name!r}", "rows"), self._traced("rows to arrive"):
            yield

    def _traced(self, section: Section) -> AbstractContextManager[None]:
        return nullcontext() if self.trace is None else self.trace.within(section)

    def join(self) -> World:
        """Wait until the gang is complete."""
        with self._changed:
            self._changed.wait_for(lambda: self.assignment)
        a = self.assignment
        self.store_limit = a["store_limit"]
        peers = peers_of(json.loads(self._peers))
        me = peers[a["rank"]]
        return World(
            a["rank"], a["size"], a["local_rank"], a["local_size"], me.host, me.device, peers, a["run_id"], self
        )

    def await_all(self) -> None:
        """Wait until every rank's function has returned: this process may hold the store that others still use."""
        with self._changed:
            self._changed.wait_for(lambda: self._all_finished)

    def send(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        """Tell the coordinator, by way of the supervisor."""
        self._channel.send(kind, blob, **fields)

    def aside(self, where: str, error: BaseException) -> None:
        """To the driver: something raised that neither ends this rank nor changes its result."""
        failure = Failure.of(error, self.assignment["rank"], pid=os.getpid())
        facts = {"type": failure.type, "text": failure.text, "traceback": failure.traceback}
        with suppress(WireError):  # then there is no one to tell
            self.send("aside", pid=failure.pid, **short({"where": where}), **facts)

    def meet(self, operation: str, value: bytes, lane: str = "main") -> list[bytes]:
        """Every rank's bytes, in rank order. Each thread that meets has a lane of its own."""
        return self.post(operation, value, lane)()

    def post(self, operation: str, value: bytes, lane: str = "main") -> Callable[[], list[bytes]]:
        """Begin to meet; what is returned waits for the others. Raises TooLarge for a value that no one could get."""
        check_value(operation, self.assignment["rank"], value)
        with self._changed:
            number = self._meetings.get(lane, 0)
            self._meetings[lane] = number + 1
        self.send("gather", value, lane=lane, number=number, operation=operation)
        return functools.partial(self._met, operation, (lane, number))

    def _met(self, operation: str, key: tuple[str, int]) -> list[bytes]:
        # A meeting of another lane is held in the background: the rank goes on with what it does.
        shown = self.pulse.within(f"in {operation}", "wait") if key[0] == "main" else nullcontext()
        with shown, self._traced("communicate"), self._changed:
            self._changed.wait_for(lambda: key in self._gathered)
            message = self._gathered.pop(key)
        if "problem" in message.fields:
            raise TritiumError(f"world.{operation}(): {message['problem']}")
        values, start = [], 0
        for length in message["lengths"]:
            values.append(message.blob[start : start + length])
            start += length
        return values

    def tell(self, kind: str, **fields: Any) -> None:
        """To the driver's events. Texts that are too long are cut, keeping beginning and end."""
        self.send(kind, **short(fields))

    def log(self, fields: Mapping[str, Any]) -> None:
        """To the driver's progress display and events."""
        self.pulse.logged(fields)
        try:
            self.send("log", **fields)
        except TooLarge as error:
            raise too_much_to_log(fields, error) from None

    def store(self, piece: Piece) -> None:
        """To the run directory."""
        with self.pulse.within(f"storing {piece.name!r}"):
            self.send("store", piece.body, **piece.fields())

    def shard(self, name: str) -> Shard:
        """Wait until the supervisor has spooled its rows (or the first of them, when they stream)."""
        names = self.assignment["names"]
        if name not in names:
            there = ", ".join(map(repr, names)) or "none: launch(…, data={…}) names them"
            raise BadSetting(f"There is no shard {name!r}. There are: {there}.")
        with self.pulse.within(f"waiting for rows of {name!r}", "rows"), self._changed:
            self._changed.wait_for(lambda: name in self._spools)
        with self._changed:
            if name not in self._shards:
                self._shards[name] = self._open(name, self._spools[name])
            return self._shards[name]

    def confirm_rows(self) -> None:
        """Wait until every shard that this rank has asked for is known to be complete, on all ranks."""
        with self._changed:
            shards = list(self._shards.values())
        for shard in shards:
            shard.counts  # noqa: B018 - it waits

    def _open(self, name: str, message: Message) -> Shard:
        from tritium.data.memory import memory_limit
        from tritium.data.schema import Field
        from tritium.data.shard import Shard

        body = json.loads(message.blob)
        return Shard(
            name,
            body["columns"],
            [Field.from_json(f) for f in body["fields"]],
            index=self.assignment["rank"],
            size=self.assignment["size"],
            feed=self._feed(name),
            decode=self.decoders.get(name, {}),
            tensors=self.tensors,
            prepared=message["prepared"],
            memory=memory_limit() // (2 * self.assignment["local_size"]),  # the ranks of a host share its memory
            on_epoch_end=functools.partial(self._epoch_ended, name),
            on_batch=functools.partial(self.pulse.took, name),
            on_message=lambda text: self.tell("note", text=text),
            trace=self.trace,
        )

    def _epoch_ended(self, name: str, counts: Mapping[str, Any]) -> None:
        self.pulse.enter(f"after epoch {counts['epoch'] + 1} of {name!r}")
        self.send("counts", name=name, counts=dict(counts))
