"""The connection to the engine process of a device, which is started where there is none (Spark's Python worker).

All Python workers of an executor that use a device call one process, which holds the weights there.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tritium import ship
from tritium.errors import WireError
from tritium.gang.supervisor.process import environment, start_python
from tritium.predict.array_channel import BROKEN, ArrayChannel, Raised
from tritium.predict.weights import local_file
from tritium.wire import peer, reach

if TYPE_CHECKING:
    from tritium.model.engine import Arrays

PRETENDED = "TRITIUM_PRETENDED_DEVICES"
"""The variable by which tests name devices of the CPU that count as others, with commas."""
WELCOME_BYTES = 8
_STARTS = 3
_SENT = ("engine", "facts", "code", "content", "computes", "device", "transform")

# The process is no child of the worker's, which would not wait for it. It has the zip of this package open before the
# worker may end.
_BOOT = """
import os, sys
home, argument = sys.argv[1:]
zipped = None if os.path.isdir(home) else os.open(home, os.O_RDONLY)
if os.fork():
    os._exit(0)
if zipped is None:
    sys.path.append(home)
else:
    sys.path.insert(0, f"/proc/{os.getpid()}/fd/{zipped}")
from tritium.predict.engine_process import main
main(argument)
"""


def is_needed(device: str) -> bool:
    """Return whether models on this device are called in a process of its own. On the CPU they are in the worker's."""
    if sys.platform != "linux":  # The names of sockets and memory end with their processes only there.
        return False
    return device.partition(":")[0] != "cpu" or device in os.environ.get(PRETENDED, "").split(",")


@contextmanager
def connected(plan: dict[str, Any], sent: Any, *, cpus: int, gpus: list[str]) -> Iterator[DeviceEngine]:
    """Yield the plan's model as the engine process of its device has it.

    Raises what restoring the model raises there, and WireError where the process can't be started or has ended.
    """
    device = _device(plan["device"], gpus)
    connection, pid = _reached(device, cpus)
    with local_file(plan["weights"], sent) as path, open(path, "rb") as weights:
        channel = ArrayChannel.opened(connection, weights.fileno())
    with closing(channel):
        engine = DeviceEngine(channel, device, pid)
        engine.ask({name: plan[name] for name in _SENT}, cpus, gpus)
        yield engine


class DeviceEngine:
    """A model in the engine process of a device."""

    def __init__(self, channel: ArrayChannel, device: str, pid: int) -> None:
        self._channel, self._device, self._pid = channel, device, pid

    def call(self, batch: Arrays, outputs: Sequence[str]) -> Arrays:
        """Do as `Engine.call`, and raise what the model raises."""
        return {name: array.copy() for name, array in self.ask(dict(batch), list(outputs)).items()}

    def ask(self, *message: Any) -> Any:
        """Return the answer to a message, or raise it. Raises WireError where the process has ended."""
        try:
            self._channel.send(message)
            answer = self._channel.receive()
        except BROKEN as error:
            raise WireError(
                f"The engine process of {self._device} on {socket.gethostname()} (pid {self._pid}) was killed or has "
                "crashed. What it has written is in the executor's log. A task that Spark retries starts a new one."
            ) from error
        if isinstance(answer, Raised):
            raise answer.error()
        return answer


def _device(device: str, gpus: list[str]) -> str:
    """Return the name of a device with its number, of a task with the GPUs of these addresses."""
    kind, _, number = device.partition(":")
    return f"{'cuda' if kind == 'gpu' else kind}:{number or (gpus[0] if gpus else 0)}"


def _reached(device: str, cpus: int) -> tuple[socket.socket, int]:
    """Connect to the engine process of a device, and return its pid, too. Start it where there is none."""
    path = ship.importable()
    # Spark has a Python daemon for each environment of an executor's workers.
    facts = [
        os.readlink("/proc/self/ns/pid"),
        os.getppid(),
        getattr(sys.modules["tritium"], "__digest__", ""),
        device,
        path,
    ]
    name = f"\0tritium-engine-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}"
    for _ in range(_STARTS):  # A process may have ended, idle, just when it was connected to.
        connection, listener = reach(name)
        if listener is not None:
            with listener:
                _start(listener, path, cpus)
        elif peer(connection)[1] != os.getuid():
            raise WireError(f"The socket of the engine process of {device} is taken by another user's process.")
        with suppress(ConnectionError):
            welcome = connection.recv(WELCOME_BYTES)
            if welcome:
                return connection, int.from_bytes(welcome, "big")
        connection.close()
    raise WireError(
        f"The engine process of {device} on {socket.gethostname()} has ended before it answered, {_STARTS} times. "
        "Its output is in the executor's log."
    )


def _start(listener: socket.socket, path: list[str], cpus: int) -> None:
    order = {"listener": listener.fileno(), "daemon": os.getppid(), "path": path}
    starter = start_python(
        _BOOT,
        [json.dumps(order)],
        environment=environment({}, cpus),
        stdout=1,
        stderr=2,
        keep=[listener.fileno()],
    )
    starter.wait()
