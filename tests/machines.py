"""Supervisors in processes of their own, as on executors, without Spark; and hosts in network namespaces."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from tritium import ship
from tritium.gang.coordinator import Coordinator
from tritium.gang.supervisor import Order

_MAIN = """
import pickle, sys
from tritium.gang.supervisor import GangEnded, Supervisor
order, partition, attempt = pickle.load(sys.stdin.buffer)
try:
    list(Supervisor(order, partition=partition, attempt=attempt, gpus=(), cpus=1).run(iter(()), lambda: True))
except GangEnded as error:
    sys.exit(str(error))
"""


def order_for(coordinator: Coordinator, function: Callable[..., Any], *args: Any, **changes: Any) -> Order:
    """What every supervisor of this gang is told."""
    job = ship.pickle((function, args, {}, {}))
    facts = {
        "launch": coordinator.launch,
        "run_id": "r",
        "size": coordinator.size,
        "secret": coordinator.secret,
        "env": {},
    }
    return Order(**{**facts, "address": coordinator.address, "job": job, **changes})


class Machine:
    """One supervisor, which starts its rank below itself."""

    def __init__(self, order: Order, partition: int, *, attempt: int = 0, inside: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-c", _MAIN], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdin is not None
        self.process.stdin.write(pickle.dumps((order, partition, attempt)))
        self.process.stdin.close()

    def processes(self) -> list[psutil.Process]:
        """The supervisor and what it has started."""
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """As a host that stands still: nothing runs, nothing is closed."""
        for process in self.processes():
            process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """The host wakes up."""
        for process in self.processes():
            process.send_signal(signal.SIGCONT)

    def end(self, seconds: float = 10.0) -> str:
        """Wait for its end; what it said last."""
        assert self.process.stderr is not None
        try:
            self.process.wait(seconds)
            return self.process.stderr.read().decode()
        finally:
            self.close()

    def close(self) -> None:
        """End it, whatever it does."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


class Host:
    """A network namespace with one cable to this machine: `near` is our address on it, `far` the host's."""

    def __init__(self, number: int) -> None:
        self.name = f"tritium-{os.getpid()}-{number}"
        self.cable = f"tr{os.getpid() % 100_000}n{number}"
        self.near, self.far = f"10.213.{number}.1", f"10.213.{number}.2"
        self.inside = ("ip", "netns", "exec", self.name)
        _ip("netns", "add", self.name)
        _ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("addr", "add", f"{self.near}/24", "dev", self.cable)
        _ip("link", "set", self.cable, "up")
        for words in (("addr", "add", f"{self.far}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _ip("-n", self.name, *words)
        _ip("-n", self.name, "link", "set", "lo", "up")

    def plug(self, plugged: bool) -> None:
        """Pull the cable, or put it in again."""
        _ip("link", "set", self.cable, "up" if plugged else "down")

    def close(self) -> None:
        """Remove it."""
        _ip("netns", "del", self.name)


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts; gone afterwards."""
    made: list[Host] = []
    try:
        for number in range(count):
            made.append(Host(number + 1))
        yield made
    finally:
        for host in made:
            host.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
