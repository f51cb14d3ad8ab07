"""What the three ways to run a gang have in common: start it, wait for its results, end it (driver)."""

from __future__ import annotations

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
    """Runs one attempt. Called in this order, and `cancel` also after an error of the others.

    A launcher checks in its constructor what it can, and raises SetupError there.
    """

    def start(self) -> None: ...  # returns at once
    def wait(self) -> list[Any]: ...  # every rank's result in rank order, or the error that ended the gang
    def cancel(self) -> None: ...  # ends what is left of the gang; nothing of it runs afterwards


def run(attempt: Attempt) -> list[Any]:
    """Every rank's result in rank order, from where `attempt.gang.on` says."""
    module, name = _LAUNCHERS[attempt.gang.on]
    launcher: Launcher = getattr(import_module(module), name)(attempt)
    try:
        launcher.start()
        return launcher.wait()
    finally:
        launcher.cancel()
