"""Messages between processes of a host, with their arrays in shared memory (Spark's Python worker, engine process).

The memory has no name: the kernel frees it with the last process that has it, whatever ends that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

_ALIGNED = 64
_GROWN = 1 << 20
BROKEN = (OSError, EOFError, pickle.UnpicklingError)
"""What `send` and `receive` raise where the other end is gone."""


class ArrayChannel:
    """One end of a connection. Each message is answered before the next one, as its arrays are overwritten then."""

    def __init__(self, connection: socket.socket, outgoing: int, incoming: int) -> None:
        """Take the connection, and the descriptors of the memory for each direction, which `close` closes."""
        self._connection, self._stream = connection, connection.makefile("rwb")
        self._outgoing, self._incoming = _Memory(outgoing), _Memory(incoming)

    @classmethod
    def opened(cls, connection: socket.socket, extra: int) -> ArrayChannel:
        """Open a channel by a new connection, and pass the descriptor `extra` on to `accepted`."""
        ends = [os.memfd_create("tritium-arrays") for _ in range(2)]
        channel = cls(connection, *ends)
        socket.send_fds(connection, [b"\0"], [*ends, extra])
        return channel

    @classmethod
    def accepted(cls, connection: socket.socket) -> tuple[ArrayChannel, int]:
        """Return the channel that the other end has opened, and the descriptor that it has passed on."""
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        if len(descriptors) < 3:
            raise EOFError
        outgoing, incoming, extra = descriptors
        return cls(connection, incoming, outgoing), extra

    def send(self, message: Any) -> None:
        """Send anything that can be pickled."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, 5, buffer_callback=buffers.append)
        parts, places, end = [buffer.raw() for buffer in buffers], [], 0
        for part in parts:
            places.append((end, end + part.nbytes))
            end += -(-part.nbytes // _ALIGNED) * _ALIGNED
        memory = self._outgoing.of_size(end)
        for (start, stop), part in zip(places, parts, strict=True):
            memory[start:stop] = part
        pickle.dump((body, places, end), self._stream)
        self._stream.flush()

    def receive(self) -> Any:
        """Return the next message. Its arrays can't be written to, and hold until the next call of `send`."""
        body, places, size = pickle.load(self._stream)
        memory = self._incoming.of_size(size).toreadonly()
        return pickle.loads(body, buffers=[memory[start:stop] for start, stop in places])

    def close(self) -> None:
        """Close this end, and its memory, but for arrays that still view it."""
        for end in (self._outgoing, self._incoming):
            os.close(end.descriptor)
        with contextlib.suppress(OSError):  # What was not sent can't be, where the other end is gone.
            self._stream.close()
        self._connection.close()


@dataclass(frozen=True)
class Raised:
    """An error as a message."""

    pickled: bytes
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Make a message of an error; one that a pickle would change becomes one of the same name and text."""
        try:
            pickled = cloudpickle.dumps(error)
            kept = str(pickle.loads(pickled)) == str(error)
        except Exception:  # noqa: BLE001 - any class may refuse in any way
            kept = False
        if not kept:
            pickled = cloudpickle.dumps(type(type(error).__name__, (RuntimeError,), {})(str(error)))
        return cls(pickled, "".join(traceback.format_exception(error)))

    def error(self) -> BaseException:
        """Return the error, with a note of where it was raised. Spark leaves out the cause of an error, but no note."""
        error: BaseException = pickle.loads(self.pickled)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"\nIn the engine process:\n{self.traceback}")
        return error


class _Memory:
    """Shared memory that grows."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapped = memoryview(b"")

    def of_size(self, size: int) -> memoryview:
        """Return the memory, of at least this size."""
        if size > len(self._mapped):
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, -(-size // _GROWN) * _GROWN)
            self._mapped = memoryview(mmap.mmap(self.descriptor, 0))
        return self._mapped
