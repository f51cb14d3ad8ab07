"""Deliver messages once and in order, over connections that may break (driver, supervisor).

Each side of a session numbers the messages it sends, and keeps each until the other side has confirmed it. When the
connection breaks, the next one begins with the number of messages that each side has received, and the rest is sent
again. The numbers of messages are not transmitted, as a connection neither loses nor reorders anything.

Three kinds of message belong to the connection and are not counted:

    session(id, who, first, received)   the first one, from the supervisor; answered by session(received)
    heartbeat(received[, unheard])      confirms so many messages; the coordinator's also has the seconds since it last
                                        heard the supervisor, as a network may be cut in one direction only
    closed(reason)                      from the coordinator: this session is refused, or closed
"""

from __future__ import annotations

from collections import deque

from tritium.errors import WireError
from tritium.wire import Packed

TICK = 0.5
"""Seconds between two checks of each side whether a heartbeat is due, or the other side is silent."""
HEARTBEAT_SECONDS = 1.0
"""After so many seconds without sending, a heartbeat is sent."""
SILENCE = 4.0
"""After so many seconds without receiving a byte, a connection is considered broken."""
GRACE = 7.0
"""A supervisor ends after so many seconds without the coordinator, in either direction."""
LOST = 10.0
"""The coordinator gives a silent supervisor up after so many seconds: later than GRACE ends its rank."""
ACK_MESSAGES = 64
"""So many messages, or ACK_BYTES, are confirmed at once instead of by the next heartbeat."""
ACK_BYTES = 1 << 20
_OVERHEAD_BYTES = 256
"""Those of keeping a message."""


def late(unheard: float) -> float:
    """Return the seconds of silence beyond the usual interval of heartbeats."""
    return max(0.0, unheard - HEARTBEAT_SECONDS - TICK)


class Outbox:
    """Messages of one direction that are unsent or unconfirmed. Not thread-safe."""

    def __init__(self) -> None:
        self.size = 0
        """The bytes of the messages that are kept."""
        self._first = 0
        """The number of the oldest message that is kept."""
        self._sent: deque[Packed] = deque()
        self._unsent: deque[Packed] = deque()

    def __bool__(self) -> bool:
        """Tell whether any message is unsent."""
        return bool(self._unsent)

    @property
    def first(self) -> int:
        """The number of confirmed messages."""
        return self._first

    @property
    def kept(self) -> int:
        """The number of unconfirmed messages."""
        return len(self._sent) + len(self._unsent)

    def add(self, message: Packed) -> None:
        """Append a message to be sent."""
        self._unsent.append(message)
        self.size += len(message) + _OVERHEAD_BYTES

    def next(self) -> Packed:
        """Return the next message to send; it is kept until it is confirmed."""
        message = self._unsent.popleft()
        self._sent.append(message)
        return message

    def confirm(self, received: int) -> None:
        """Drop the messages that the other side has received. Raises WireError for an impossible number."""
        if not self._first <= received <= self._first + len(self._sent):
            raise WireError(
                f"The other end says that it has {received} messages; {self._first} were confirmed and "
                f"{len(self._sent)} more sent."
            )
        for _ in range(received - self._first):
            self.size -= len(self._sent.popleft()) + _OVERHEAD_BYTES
        self._first = received

    def resume(self, received: int) -> None:
        """Confirm `received` messages on a new connection, and mark all others unsent."""
        self.confirm(received)
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()


class Inbox:
    """Counts the messages received in one direction, and decides when to confirm them."""

    def __init__(self) -> None:
        self.received = 0
        self._acknowledged = 0
        self._bytes = 0

    def count(self, size: int) -> None:
        """Count a message with a blob of `size` bytes."""
        self.received += 1
        self._bytes += size

    @property
    def due(self) -> bool:
        """Whether to confirm now instead of with the next heartbeat."""
        return self._bytes >= ACK_BYTES or self.received - self._acknowledged >= ACK_MESSAGES

    def acknowledge(self) -> int:
        """Return the number of messages to confirm, and count from there."""
        self._acknowledged, self._bytes = self.received, 0
        return self.received
