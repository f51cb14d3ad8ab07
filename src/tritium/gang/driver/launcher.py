"""The interface of the ways to run a gang (driver).

There are three, `on="cluster"`, `"driver"` and `"here"`. Another distribution adds one as an entry point of the group
`tritium.launchers`: its name is a value of `on`, and it names a class with the methods of `Launcher`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

from tritium.errors import TritiumError
from tritium.gang.limits import GRACE_SECONDS
from tritium.gang.program import ENDING, Program
from tritium.gang.settings import ENTRY_POINTS

if TYPE_CHECKING:
    from tritium.gang.driver.attempt import Attempt

_LAUNCHERS = {
    "cluster": ("tritium.gang.driver.on_cluster", "OnCluster"),
    "driver": ("tritium.gang.driver.local_processes", "LocalProcesses"),
    "here": ("tritium.gang.driver.in_process", "InProcess"),
}


class Launcher(Protocol):
    """Runs one attempt, in the thread that called `launch` or that `submit` has started.

    The constructor takes the attempt: function, arguments, gang, data, recorder. It checks what can be checked before
    the start, and raises SetupError. Then `start`, `wait` and `cancel` are called; `cancel` also after an error in
    another one. A loss that may be retried is an error whose `lost` is true.
    """

    def start(self) -> None:
        """Start the ranks without waiting for them."""

    def wait(self) -> list[Any]:
        """Return the results in rank order, or raise the error that ended the gang."""

    def signal(self, number: int) -> bool:
        """Send every rank process a signal. Return False where they can't be reached."""

    def interrupt(self) -> None:
        """Have `start` and `wait` soon call `attempt.cancellation.check()`, which raises. Called by another thread."""

    def cancel(self) -> None:
        """End all that still runs, and return when nothing does."""


def run(attempt: Attempt) -> list[Any]:
    """Run one attempt with the launcher of `attempt.gang.on`, and return the results in rank order."""
    with own_interrupts() if attempt.gang.on == "cluster" else nullcontext():  # Also while it waits for slots.
        attempt.cancellation.check()
        launcher = launcher_of(attempt.gang.on)(attempt)
        try:
            with (
                attempt.cancellation.interrupting(launcher.interrupt),
                forwarded_signals(launcher) if isinstance(attempt.function, Program) else nullcontext(),
            ):
                launcher.start()
                return launcher.wait()
        finally:
            launcher.cancel()


def launcher_of(on: str) -> Callable[[Attempt], Launcher]:
    """Return the class of the launcher of this name. Raises BadSetting where there is none."""
    if on in _LAUNCHERS:
        module, name = _LAUNCHERS[on]
        return cast("Callable[[Attempt], Launcher]", getattr(import_module(module), name))
    return cast("Callable[[Attempt], Launcher]", entry_points(group=ENTRY_POINTS)[on].load())


def start_thread(attempt: Attempt, target: Callable[[], object]) -> threading.Thread:
    """Start a thread for a run. On Spark it inherits the properties of the calling thread: job group, tags, pool.

    Raises BadSetting for a session that can't be used, and JobFailed for one whose JVM has ended.
    """
    name = f"tritium-run-{attempt.run_id}"
    if attempt.gang.on != "cluster":
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread
    from tritium.gang.driver.on_cluster import jvm_errors, session_of
    from tritium.spark.session import Session

    attempt.spark = session_of(attempt)
    with jvm_errors(attempt.spark):
        thread = Session.usable(attempt.spark).thread(target, name)
        thread.start()
    return thread


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
