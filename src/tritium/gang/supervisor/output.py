"""Pass a rank's stdout and stderr to the coordinator (supervisor)."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import IO

from tritium.errors import WireError
from tritium.gang.control.client import Client
from tritium.gang.limits import as_shown

LONGEST_LINE = 1 << 16  # a longer one is passed on in pieces
TAIL = 20  # lines of a rank's output that travel with its failure


class Output:
    """The output of one rank. `follow` runs in a thread for each of the two pipes."""

    def __init__(self, coordinator: Client) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL)
        """The last lines, up to TAIL."""
        self.pieces = 0
        """Number of pieces passed on: printing counts as progress."""
        self._coordinator = coordinator

    def follow(self, pipe: IO[bytes] | None) -> None:
        """Pass on whole lines until the pipe ends, so that stdout and stderr don't mix within a line or a character."""
        assert pipe is not None
        rest = b""
        while data := os.read(pipe.fileno(), 1 << 16):
            text = rest + data
            end = text.rfind(b"\n") + 1 or (len(text) if len(text) > LONGEST_LINE else 0)
            self._send(text[:end])
            rest = text[end:]
        self._send(rest)

    def _send(self, text: bytes) -> None:
        if not text:
            return
        self.pieces += 1
        self.tail.extend(as_shown(line) for line in text.split(b"\n") if line.strip())
        with contextlib.suppress(WireError):  # keep reading, so that the rank does not block on a full pipe
            self._coordinator.send("output", text)
