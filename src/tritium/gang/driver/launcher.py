"""The interface of the three ways to run a gang, `on="cluster"`, `"driver"` and `"here"` (driver)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from tritium.errors import TritiumError
from tritium.gang.program import ENDING, Program

if TYPE_CHECKING:
    from tritium.gang.driver.attempt import Attempt

_LAUNCHERS = {
    "cluster": ("tritium.gang.driver.on_cluster", "OnCluster"),
    "driver": ("tritium.gang.driver.local_processes", "LocalProcesses"),
    "here": ("tritium.gang.driver.in_process", "InProcess"),
}

GRACE_SECONDS = 30.0  # that ranks have after a signal, as with torchrun


class Launcher(Protocol):
    """Runs one attempt. Methods are called in this order; `cancel` is also called after an error in another one.

    The constructor checks what can be checked before the start, and raises SetupError.
    """

    def start(self) -> None: ...  # start the ranks without waiting for them
    def wait(self) -> list[Any]: ...  # return the results in rank order, or raise the error that ended the gang
    def signal(self, number: int) -> bool: ...  # send every rank process a signal; False where they can't be reached
    def cancel(self) -> None: ...  # end what still runs; return when nothing does


def run(attempt: Attempt) -> list[Any]:
    """Run one attempt with the launcher of `attempt.gang.on`, and return the results in rank order."""
    module, name = _LAUNCHERS[attempt.gang.on]
    with own_interrupts() if attempt.gang.on == "cluster" else nullcontext():  # also while it waits for slots
        launcher: Launcher = getattr(import_module(module), name)(attempt)
        try:
            with forwarded_signals(launcher) if isinstance(attempt.function, Program) else nullcontext():
                launcher.start()
                return launcher.wait()
        finally:
            launcher.cancel()


@contextmanager
def forwarded_signals(launcher: Launcher) -> Iterator[None]:
    """Send a signal that would end this process to every rank first, as torchrun does, within the block.

    A script may save its state then. KeyboardInterrupt is raised when all ranks have ended, after GRACE_SECONDS, or at
    a second signal.
    """
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1 or not launcher.signal(number):
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (*ENDING, signal.SIGALRM)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    except TritiumError as error:
        if received:
            raise KeyboardInterrupt(f"ended by {signal.Signals(received[0]).name}") from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt(f"ended by {signal.Signals(received[0]).name}")


@contextmanager
def own_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in this block, which ends this run alone.

    pyspark's handler would cancel every job of the session, and fails while this thread waits (docs/how-it-works.md).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
