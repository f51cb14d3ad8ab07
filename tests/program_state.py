"""What a program may set for its whole process, or for a thread: contexts that undo it; and ranks that use all."""

from __future__ import annotations

import decimal
import gc
import io
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tritium as tr

TIMEOUT = 0.1  # seconds of the default timeout of sockets
FRAMES = 60  # that recursion may still take
State = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_timeout() -> Iterator[None]:
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(None)


@contextmanager
def umask() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def no_working_directory() -> Iterator[None]:
    before, folder = os.getcwd(), tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def blocked_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ignored_signals() -> Iterator[None]:
    numbers = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def no_environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.update(before)


@contextmanager
def directories_that_are_not_there() -> Iterator[None]:
    names = ("TMPDIR", "HOME", "PATH", "SPARK_LOCAL_DIRS", "XDG_CACHE_HOME")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "/nowhere"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def little_recursion() -> Iterator[None]:
    before, depth, frame = sys.getrecursionlimit(), 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    sys.setrecursionlimit(depth + FRAMES)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextmanager
def closed_output() -> Iterator[None]:
    before, closed = (sys.stdout, sys.stderr), io.StringIO()
    closed.close()
    sys.stdout = sys.stderr = closed
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def no_output() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def no_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def decimals_of_two_digits() -> Iterator[None]:
    with decimal.localcontext() as context:
        context.prec = 2
        context.traps = dict.fromkeys(context.traps, True)
        yield


@contextmanager
def torch_in_float64() -> Iterator[None]:
    import torch

    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def torch_on_meta() -> AbstractContextManager[Any]:
    import torch

    return torch.device("meta")


def torch_without_gradients() -> AbstractContextManager[Any]:
    import torch

    return torch.no_grad()


def torch_for_inference() -> AbstractContextManager[Any]:
    import torch

    return torch.inference_mode()


STATES: Mapping[str, State] = {
    state.__name__: state
    for state in (
        default_timeout,
        umask,
        no_working_directory,
        blocked_signals,
        ignored_signals,
        warnings_as_errors,
        no_environment,
        directories_that_are_not_there,
        little_recursion,
        closed_output,
        no_output,
        no_collections,
        decimals_of_two_digits,
    )
} | {"numpy's errors": lambda: np.errstate(all="raise")}
OF_TORCH: Mapping[str, State] = {
    state.__name__: state for state in (torch_in_float64, torch_on_meta, torch_without_gradients, torch_for_inference)
}


@contextmanager
def all_of(states: Mapping[str, State], *without: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name, state in states.items():
            if name not in without:
                stack.enter_context(state())
        yield


def be_late() -> None:
    """Wait for longer than the default timeout, where there is one: the other rank waits for this one."""
    if seconds := socket.getdefaulttimeout():
        threading.Event().wait(2 * seconds)


def use_all(step: int) -> list[Any]:
    """Use what a world has, with a rank that is slower than the default timeout, and return what it gives."""
    world, sums = tr.world(), []
    random.seed(step)
    np.random.seed(step)
    if world.rank == step % 2:
        be_late()
    world.barrier()
    for epoch in world.shard("train").epochs(2, batch_size=4):
        sums += [float(batch["x"][: batch.rows].sum()) for batch in epoch]
    world.log(step=step, loss=1.0)
    world.note(f"note {step}")
    world.checkpoint.save({"sums": sums, "x": np.arange(3)}, step, own={"rank": world.rank})
    world.checkpoint.wait()
    loaded = world.checkpoint.load()
    assert loaded is not None
    world.store(f"{world.rank}.bin", [bytes(1000)])
    drawn = random.random(), float(np.random.random())  # the first ones of the user's own generators
    random.seed(step)
    np.random.seed(step)
    assert drawn == (random.random(), float(np.random.random()))
    return [world.gather(world.rank), sums, loaded["sums"], loaded["x"].tolist(), loaded.own]


def each(states: Mapping[str, State], use: Callable[[int], Any]) -> dict[str, Any]:
    """Return what `use` gives under each state, and under none."""
    found = {"": use(0)}
    for step, (name, state) in enumerate(states.items(), 1):
        with state():
            found[name] = use(step)
    return found


def launched(function: Callable[..., Any], *args: Any, run_dir: Path, **settings: Any) -> list[Any]:
    """Launch two ranks with a shard, and return their results, where what they have stored is there, too."""
    settings = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "stall_timeout": 20, **settings}
    table = pa.table({"x": np.arange(16, dtype=np.float32)})
    results = tr.launch(function, args=args, run_dir=str(run_dir), data={"train": table}, retries=0, **settings)
    assert [(run_dir / f"{rank}.bin").read_bytes() for rank in range(2)] == [bytes(1000)] * 2
    return results
