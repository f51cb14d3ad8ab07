"""The main program of a rank process: import the framework, run the user's function, report its end (rank).

It starts before the gang is complete, and imports the framework meanwhile. Function, rank and rows come from its
supervisor over an inherited socket.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tritium import aliases, definitions, frameworks, ship
from tritium.checkpoint.control import Regroup
from tritium.errors import ResultError, WireError
from tritium.events import made
from tritium.frameworks import huggingface, mpi
from tritium.frameworks import torch as pytorch
from tritium.frameworks.at_import import before_import, without_collections
from tritium.frameworks.framework import Framework
from tritium.gang import rank_logs
from tritium.gang.failure import Failure
from tritium.gang.rank.control import RankControl
from tritium.gang.rank.environment import (
    compare_versions,
    import_framework,
    keep_freed_memory,
    prepare_environment,
)
from tritium.gang.rank.network import connected
from tritium.gang.rank.progress_page import ProgressWriter
from tritium.gang.rank.world import World, entered, finish_checkpoints
from tritium.triton_first import import_triton
from tritium.wire import Channel

if TYPE_CHECKING:
    from tritium.observe.trace import Trace

_PR_SET_PDEATHSIG = 1
_RECURSION_LIMIT = 1000  # Python's own.
# Packages whose frames around the user's function no traceback shows.
_OWN = (__package__, frameworks.__package__, "tritium.gang")


def main(argument: str) -> None:
    """Run a rank in a process of its own. `argument` is JSON: `run`'s settings, and the `parent`'s pid."""
    settings = json.loads(argument)
    die_with(settings["parent"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # A program that calls launch may ignore it.
    run(settings, None)


def run(settings: Mapping[str, Any], imported: BaseException | Literal[True] | None) -> None:
    """Run a rank with the settings from `Supervisor._start`. Does not return.

    imported : True where `import_all` was called before the fork; the error that it raised; None: it was not called.
    """
    os.set_inheritable(settings["control"], False)
    channel = Channel(socket.socket(fileno=settings["control"]))
    answer_with_stacks(settings)
    keep_freed_memory()
    progress = ProgressWriter.on(settings["progress"])
    framework = frameworks.from_json(settings["framework"])
    trace = tracing(framework) if settings["trace"] else None
    options: dict[str, Any] = {"elastic": settings["elastic"], "progress": progress, "trace": trace}
    if framework is not None:
        options["on_returned"] = framework.on_returned
    control = RankControl(channel, **options)
    if trace is not None:
        trace.on_spans = functools.partial(control.send, "spans")
    try:
        if isinstance(imported, BaseException):
            raise imported
        if imported is None:
            import_all(settings, framework, progress)
        if settings["pmi"] is not None:
            os.environ[mpi.DESCRIPTOR] = str(settings["pmi"])
        control.progress.enter("waiting for the other ranks to start", "wait")
        channel.send("ready", pid=os.getpid())
        control.listen()
        with entered(connected(control.join(), required=framework is not None)) as world:
            prepare_environment(world, control.assignment)
            if world.rank > 0:
                os.environ.update(settings["env_above_0"])
            rank_logs.set_up(world.rank, world.run_id)
            compare_versions(framework, world)
            if world.size > 1 and not (framework and framework.pmi):
                mpi.refuse(world.size)
            if world.size > 1:
                huggingface.refuse_alone(world.size)
            _tell_of_threads(control)
            _run(control, world, settings, framework)
    except BaseException as error:  # noqa: BLE001 - every error is reported to the driver
        _report(channel, control, error)
    control.progress.enter("returned", "wait")
    control.await_all()
    control.progress.enter("leaving")
    _leave(control)


def import_all(settings: Mapping[str, Any], framework: Framework | None, progress: ProgressWriter) -> None:
    """Import the framework and the parts of Tritium that ranks need, and prepare the user's imports.

    Raises WrongVersion.
    """
    ship.import_from(settings["path"])
    aliases.add(settings["aliases"])
    before_import("tensorflow", import_triton)
    pytorch.keep_groups()
    huggingface.leave_shards()
    if framework is not None:
        progress.enter(f"importing {framework.name}")
    import_framework(framework, gpus=settings["gpus"])
    with without_collections():
        for name in settings["imports"]:
            importlib.import_module(name)


def _run(control: RankControl, world: World, settings: Mapping[str, Any], framework: Framework | None) -> None:
    sys.path[:0] = settings["mounts"]

    def call() -> Any:
        control.progress.enter("loading the function")  # To unpickle it may import the framework.
        with without_collections():
            function, args, kwargs, control.decoders, control.tensors = definitions.load(control.take_job())
        control.progress.enter("no step reported")
        with _only_this_process():
            result = function(*args, **kwargs)
        finish_checkpoints(world)
        return result

    if (trace := control.trace) is not None and isinstance(settings["trace"], str):
        from tritium.frameworks.torch_profile import StepProfiler

        trace.profiler = StepProfiler(trace, settings["trace"], world)
    if framework is not None:
        control.progress.enter(f"setting up {framework.name}", "wait")
    result = call() if framework is None else framework.run(world, call)
    if trace is not None and (sections := trace.report()) is not None:
        control.tell(made("trace", {**sections, "rank": world.rank}))
    if trace is not None and trace.profiler is not None:
        trace.profiler.on_returned()
    control.progress.enter("returning its result")
    size = _return(result, world, settings)
    _flush()
    control.send("finished", bytes=size)


@contextmanager
def _only_this_process() -> Iterator[None]:
    """End a child that the user's function has forked, where it leaves the block: it is no second rank.

    It ends as Python ends a program, but without exit handlers, which are the rank's: they disconnect it from others.
    """
    rank, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == rank:
            raise
        if isinstance(error, SystemExit):
            code = _exit_code(error)
        else:
            traceback.print_exception(_trimmed(error))
            code = 1
    if os.getpid() != rank:
        _flush()
        os._exit(code & 255)


def _return(result: Any, world: World, settings: Mapping[str, Any]) -> int:
    """Write the pickled result to the supervisor's file, and return its bytes. Raises ResultError."""
    what = f"The result of rank {world.rank}, a {type(result).__qualname__},"
    try:
        body = ship.pickle_from_rank(result)
    except Exception as error:
        raise ResultError(
            f"{what} can't be pickled: {error}. Return plain data, or store large things with world.store().",
            rank=world.rank,
        ) from error
    number, folder = settings["result"], settings["result_dir"]
    try:
        with os.fdopen(number, "wb", closefd=False) as file:
            file.write(body)
    except OSError as error:
        disk = os.fstatvfs(number)
        free = disk.f_bavail * disk.f_frsize
        raise ResultError(
            f"{what} can't be written: {error.strerror}. {len(body):,} bytes are needed in {folder} of {world.host}, "
            f"and {free:,} are free. Free space there, set TMPDIR there to another directory, or store large things "
            "with world.store().",
            rank=world.rank,
            host=world.host,
            path=folder,
            needed=len(body),
            free=free,
        ) from error
    return len(body)


def tracing(framework: Framework | None) -> Trace:
    """Return a trace that hooks into the framework at the first batch; into torch where none is named."""
    from tritium.observe.trace import Trace

    trace = Trace()
    trace.on_first_batch = functools.partial((framework or pytorch.Torch()).trace, trace)
    return trace


def _report(channel: Channel, control: RankControl, error: BaseException) -> None:
    rank = control.assignment.get("rank", -1)
    if control.trace is not None:
        with suppress(WireError):
            control.trace.flush()
    if isinstance(error, WireError):  # The supervisor is gone, and with it who takes a report.
        os._exit(1)
    sys.setrecursionlimit(max(_RECURSION_LIMIT, sys.getrecursionlimit()))  # A low limit must not hide the error.
    error = _trimmed(error)
    if isinstance(error, Regroup):
        channel.send("regroup")
        control.await_all()
    failure = Failure.of(error, rank, pid=os.getpid())
    if isinstance(error, ImportError) and isinstance(sys.modules.get(error.name or ""), definitions.ShippedModule):
        advice = "import it outside of the function that is launched, or give the file in py_files=[…]"
        text = f"{failure.text}. Only what that function uses of {error.name!r} has come from the driver: {advice}"
        failure = replace(failure, text=text)
    if isinstance(error, SystemExit):
        text = f"it called sys.exit({error.code!r:.200}) instead of returning"
        failure = replace(failure, how="exit", exit_code=_exit_code(error), text=text)
    try:
        _flush()
        channel.send("failed", failure.pickled, **failure.fields())
    finally:
        os._exit(1)  # Under sys.exit a thread or an exit handler could keep a failed rank alive.


def _exit_code(end: SystemExit) -> int:
    """Return the exit code of sys.exit, and write its text, if it has one, to stderr, as Python does."""
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    with suppress(AttributeError, OSError, ValueError):  # The user may have closed or replaced the stream.
        print(end.code, file=sys.stderr)  # noqa: T201 - see above
    return 1


def _trimmed(error: BaseException) -> BaseException:
    """Return the error, with a traceback that begins at the user's function, if it was called."""
    trimmed = error.__traceback__
    while trimmed is not None and trimmed.tb_frame.f_globals.get("__package__") in _OWN:
        trimmed = trimmed.tb_next
    return error if trimmed is None else error.with_traceback(trimmed)


def _leave(control: RankControl) -> None:
    """Exit as Python does, except that modules are not torn down; see `keep_groups` in frameworks/torch.py."""
    say, show = sys.unraisablehook, sys.excepthook

    def unraisable(problem: sys.UnraisableHookArgs) -> None:
        say(problem)
        if "atexit callback" in (problem.err_msg or ""):  # Errors of destructors are only shown, as in any Python.
            control.report_non_fatal("an exit handler", problem.exc_value or problem.exc_type())

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        control.report_non_fatal("an exit handler", error)

    sys.unraisablehook, sys.excepthook = unraisable, uncaught  # Errors of weakref.finalize go to the second.
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # Its callbacks end the threads of idle pools.
    except Exception as error:  # noqa: BLE001 - Python, too, continues with the exit handlers
        uncaught(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    _flush()
    os._exit(0)


def _tell_of_threads(control: RankControl) -> None:
    """Report to the driver exceptions that end threads of the user's. As in any Python, they end nothing else."""
    show = threading.excepthook

    def tell(problem: threading.ExceptHookArgs) -> None:
        show(problem)
        if not issubclass(problem.exc_type, SystemExit):
            name = problem.thread.name if problem.thread is not None else "?"
            control.report_non_fatal(f"its thread {name!r}", problem.exc_value or problem.exc_type())

    threading.excepthook = tell


def _flush() -> None:
    """Flush stdout and stderr, ignoring errors of streams that the user has closed or replaced."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def die_with(parent: int | None) -> None:
    """Let the kernel kill this process when its parent's thread ends (Linux); elsewhere `RankControl` exits then.

    None: let it no longer do so.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if parent is not None else 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def answer_with_stacks(settings: Mapping[str, Any]) -> None:
    """Write the stacks of all threads to the supervisor's file at its signal, and the crashing one to stderr."""
    faulthandler.enable(all_threads=False)  # The crashing thread alone, as few lines of output travel.
    for name in ("stacks", "progress"):
        os.set_inheritable(settings[name], False)
    faulthandler.register(settings["signal"], file=settings["stacks"], all_threads=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # The thread that called tritium.launch may block signals.
