"""Supervisors in processes of their own, as on executors, without Spark; and hosts in network namespaces."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import psutil

from tritium import ship
from tritium.events import Event
from tritium.frameworks.framework import Framework
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.order import Order
from tritium.observe.stored import Piece

_MAIN = """
import pickle, sys
from tritium.gang.supervisor.ending import GangEnded
from tritium.gang.supervisor.supervisor import Supervisor
order, partition, attempt = pickle.load(sys.stdin.buffer)
try:
    list(Supervisor(order, partition=partition, attempt=attempt, gpus=(), cpus=1).run(iter(()), lambda: True))
except GangEnded as error:
    sys.exit(str(error))
"""


def order_for(coordinator: Coordinator, function: Callable[..., Any], *args: Any, **changes: Any) -> Order:
    """Return the order for every supervisor of this gang."""
    job = ship.pickle((function, args, {}, {}, False))
    facts = {
        "launch": coordinator.launch,
        "run_id": "r",
        "size": coordinator.size,
        "secret": coordinator.secret,
        "env": {},
    }
    return Order(**{**facts, "address": coordinator.address, "job": job, **changes})


class Observer:
    """An observer that keeps the coordinator's events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.text: dict[int, str] = {}

    def event(self, event: Event) -> None:
        self.events.append((event.kind, event.fields()))

    def output(self, rank: int, text: str) -> None:
        self.text[rank] = self.text.get(rank, "") + text

    def spans(self, rank: int, line: bytes) -> None:
        raise AssertionError("nothing is traced here")

    def store(self, piece: Piece) -> None:
        assert piece.name.startswith("stacks/"), "nothing else is stored here"

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in list(self.events) if name == kind]


@contextlib.contextmanager
def serving(size: int, **settings: Any) -> Iterator[Coordinator]:
    """Yield a coordinator of a gang of `size` ranks."""
    coordinator = Coordinator(size, launch="L1", observer=Observer(), **settings).start()
    try:
        yield coordinator
    finally:
        coordinator.close()


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
        """Return the supervisor and all its descendants."""
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """Stop all processes, as on a frozen host: nothing runs, nothing is closed."""
        for process in self.processes():
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all processes."""
        for process in self.processes():
            process.send_signal(signal.SIGCONT)

    def end(self, seconds: float = 10.0) -> str:
        """Wait for its end. Returns its standard error."""
        assert self.process.stderr is not None
        try:
            self.process.wait(seconds)
            return self.process.stderr.read().decode()
        finally:
            self.close()

    def close(self) -> None:
        """Kill it, whatever it does."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


NOBODY = "02:00:00:00:00:99"


class Host:
    """A network namespace with one cable to this machine: `near` is our address on it, `far` the host's."""

    _numbers = itertools.count()  # a new one each time: the kernel removes a namespace with a delay

    def __init__(self) -> None:
        number = next(self._numbers)
        self.name = f"tritium-{os.getpid()}-{number}"
        self.cable = f"tr{os.getpid() % 100_000}n{number}"
        block = (os.getpid() * 16 + number) % (64 * 256)  # distinct between concurrent test processes
        self.near, self.far = (f"10.{192 + block // 256}.{block % 256}.{end}" for end in (1, 2))
        self.inside = ("ip", "netns", "exec", self.name)
        _ip("netns", "add", self.name)
        _ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("addr", "add", f"{self.near}/24", "dev", self.cable)
        _ip("link", "set", self.cable, "up")
        for words in (("addr", "add", f"{self.far}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _ip("-n", self.name, *words)
        _ip("-n", self.name, "link", "set", "lo", "up")

    def plug(self, plugged: bool) -> None:
        """Plug the cable in, or unplug it."""
        _ip("link", "set", self.cable, "up" if plugged else "down")

    def mute(self) -> None:
        """Drop all that the host sends here, by addressing it to a MAC that does not exist."""
        _ip("-n", self.name, "neigh", "replace", self.near, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def deafen(self) -> None:
        """Drop all that is sent from here to the host."""
        _ip("neigh", "replace", self.far, "lladdr", NOBODY, "dev", self.cable, "nud", "permanent")

    def close(self) -> None:
        """Remove the namespace."""
        _ip("netns", "del", self.name)


class Cable:
    """A direct link between two hosts, the only route for what they send to each other.

    own : whether each end has an address of its own, so that the hosts reach each other by these only.
    """

    def __init__(self, first: Host, second: Host, *, own: bool = False) -> None:
        self._ends = ((first, second), (second, first))
        link = ("peer", "name", "direct", "netns", second.name)
        _ip("-n", first.name, "link", "add", "direct", "type", "veth", *link)
        for here, there in self._ends:
            _ip("-n", here.name, "link", "set", "direct", "up")
            if own:
                _ip("-n", here.name, "addr", "add", f"10.190.0.{1 + (here is second)}/24", "dev", "direct")
            else:
                _ip("-n", here.name, "route", "add", there.far, "dev", "direct", "src", here.far)

    def cut(self) -> None:
        """Drop everything from now on, without an error at either end."""
        for here, there in self._ends:
            _ip("-n", here.name, "neigh", "replace", there.far, "lladdr", NOBODY, "dev", "direct", "nud", "permanent")


def can_make_hosts() -> bool:
    """Return whether this process may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Yield `count` hosts, which are removed afterwards."""
    made: list[Host] = []
    try:
        for _ in range(count):
            made.append(Host())
        yield made
    finally:
        for host in made:
            host.close()


def run_on_hosts(
    function: Callable[..., Any],
    *args: Any,
    framework: Framework | None = None,
    each: int = 1,
    known: str | None = None,
    cable: Literal["routed", "own", None] = "routed",
    seconds: float = 60.0,
) -> list[str]:
    """Run a gang on two hosts, `each` ranks on each, with names and shared memory of their own, and return its notes.

    known : the line of a host's /etc/hosts, with {name} and {address}; None leaves the file as it is here.
    cable : by which the hosts reach each other, see Cable; None: they reach this machine alone.

    Raises the gang's error.
    """
    with hosts(2) as both, contextlib.ExitStack() as stack:
        if cable is not None:
            Cable(*both, own=cable == "own")
        coordinator = stack.enter_context(serving(2 * each, host="0.0.0.0"))
        for partition, host in enumerate(both * each):
            address = (host.near, coordinator.address[1])
            order = order_for(coordinator, function, *args, address=address, framework=framework)
            own = f"hostname {host.name} && mount -t tmpfs none /dev/shm"
            if known is not None:
                line = known.format(name=host.name, address=host.far)
                own += f" && echo '{line}' >/dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts"
            own += ' && exec "$@"'
            inside = (*host.inside, "unshare", "--uts", "--mount", "sh", "-c", own, "-")
            stack.callback(Machine(order, partition, inside=inside).close)
        with coordinator.changed:
            ended = coordinator.changed.wait_for(lambda: coordinator.finished or coordinator.failure, seconds)
        if coordinator.failure is not None:
            raise coordinator.failure.error()
        assert ended, f"the ranks have not returned within {seconds:g} s"
        assert isinstance(coordinator.observer, Observer)
        return [str(note["text"]) for note in coordinator.observer.of("note")]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
