"""The interface of the three ways to run a gang, `on="cluster"`, `"driver"` and `"here"` (driver)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tritium.gang.driver.attempt import Attempt

_LAUNCHERS = {
    "cluster": ("tritium.gang.driver.on_cluster", "OnCluster"),
    "driver": ("tritium.gang.driver.local_processes", "LocalProcesses"),
    "here": ("tritium.gang.driver.in_process", "InProcess"),
}


class Launcher(Protocol):
    """Runs one attempt. Methods are called in this order; `cancel` is also called after an error in another one.

    The constructor checks what can be checked before the start, and raises SetupError.
    """

    def start(self) -> None: ...  # start the ranks without waiting for them
    def wait(self) -> list[Any]: ...  # return the results in rank order, or raise the error that ended the gang
    def cancel(self) -> None: ...  # end what still runs; return when nothing does


def run(attempt: Attempt) -> list[Any]:
    """Run one attempt with the launcher of `attempt.gang.on`, and return the results in rank order."""
    module, name = _LAUNCHERS[attempt.gang.on]
    with own_interrupts() if attempt.gang.on == "cluster" else nullcontext():  # also while it waits for slots
        launcher: Launcher = getattr(import_module(module), name)(attempt)
        try:
            launcher.start()
            return launcher.wait()
        finally:
            launcher.cancel()


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
