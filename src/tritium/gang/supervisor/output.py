"""Pass a rank's stdout and stderr to the coordinator (supervisor)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import termios
from collections import deque
from collections.abc import Iterator
from typing import IO

from tritium.errors import WireError
from tritium.gang.control.client import Client
from tritium.gang.limits import as_shown

LONGEST_LINE = 1 << 16
"""A longer line is passed on in pieces."""
_PIECE = 1 << 16
TAIL = 20
"""The lines of a rank's output that travel with its failure."""


class RankOutput:
    """The output of one rank. `follow` runs in a thread for each of the two pipes."""

    def __init__(self, coordinator: Client, noise: re.Pattern[bytes]) -> None:
        """Pass it on without the whole lines that `noise` matches."""
        self.tail: deque[str] = deque(maxlen=TAIL)
        """The last lines, up to TAIL."""
        self.pieces = 0
        """Number of pieces passed on: printing counts as progress."""
        self._coordinator, self._noise = coordinator, noise
        self._ended, self._end = os.pipe()  # Closing the second makes the first readable, for a select.
        self._open = True

    def end(self) -> None:
        """Let `follow` return when it has passed on what is in its pipe by now: a child of the rank may keep that open.

        To be called when the rank's process has ended.
        """
        if self._open:
            self._open = False
            os.close(self._end)

    def close(self) -> None:
        """Close what `end` takes; to be called when `follow` has returned, or will not be called."""
        self.end()
        os.close(self._ended)

    def follow(self, pipe: IO[bytes] | None) -> None:
        """Pass on whole lines until the pipe ends, so that stdout and stderr don't mix within a line or a character."""
        assert pipe is not None
        rest = b""
        for data in self._pieces_of(pipe.fileno()):
            text = rest + data
            end = text.rfind(b"\n") + 1 or (len(text) if len(text) > LONGEST_LINE else 0)
            self._send(text[:end])
            rest = text[end:]
        self._send(rest)

    def _pieces_of(self, pipe: int) -> Iterator[bytes]:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        while self._ended not in dict(poll.poll()):
            if not (data := os.read(pipe, _PIECE)):
                return
            yield data
        left = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
        while left > 0 and (data := os.read(pipe, min(left, _PIECE))):
            left -= len(data)
            yield data

    def _send(self, text: bytes) -> None:
        if not text:
            return
        self.pieces += 1
        if not (text := self._noise.sub(b"", text)):
            return
        self.tail.extend(as_shown(line) for line in text.split(b"\n") if line.strip())
        with contextlib.suppress(WireError):  # Reading goes on, or the rank would block on a full pipe.
            self._coordinator.send("output", text)
