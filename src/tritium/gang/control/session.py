"""What outlives a connection: messages not yet known to have arrived (driver, supervisor).

Each side of a session numbers the messages it sends, and keeps each until the other side has said that it has it. When
the connection breaks, the next one begins with how many each side has received, and goes on from there: every message
is delivered once and in order. The numbers need not travel, since a connection neither loses nor reorders anything.

Three kinds of message belong to the connection and are not counted:

    session(id, who, first, received)   the first one, from the supervisor; answered by session(received)
    heartbeat(received[, unheard])           "I am here, and this is what I have"; the coordinator's says for how many
                                        seconds it has not heard the other end: a cable may be cut in one direction
    over(reason)                        from the coordinator: this session is not, or no longer, one of this run
"""

from __future__ import annotations

from collections import deque

from tritium.errors import WireError
from tritium.wire import Packed

TICK = 0.5  # how often an end looks whether it must say something, or has heard nothing for too long
HEARTBEAT_SECONDS = 1.0  # after so many seconds without a word a heartbeat is sent
SILENCE = 4.0  # after so many seconds without a byte a connection is taken for broken
GRACE = 7.0  # after so many seconds in which the coordinator said nothing, or heard nothing of it, a supervisor ends
LOST = 10.0  # after so many seconds without a word from a supervisor its rank is lost: later than the rank's own end

ACK_MESSAGES = 64  # so many messages, or so many bytes, are confirmed at once rather than by the next heartbeat
ACK_BYTES = 1 << 20
_EACH = 256  # bytes that keeping a message costs, however small it is

CONTROL = ("session", "heartbeat", "over")


def late(unheard: float) -> float:
    """Seconds of silence beyond those that are usual between two heartbeats."""
    return max(0.0, unheard - HEARTBEAT_SECONDS - TICK)


class Outbox:
    """Messages of one direction that are to be sent, or may have to be sent again. Not safe for several threads."""

    def __init__(self) -> None:
        self.size = 0  # bytes kept
        self._first = 0  # the number of the oldest message kept
        self._sent: deque[Packed] = deque()
        self._unsent: deque[Packed] = deque()

    def __bool__(self) -> bool:
        """Whether anything is to be sent."""
        return bool(self._unsent)

    @property
    def first(self) -> int:
        """How many messages the other side is known to have."""
        return self._first

    @property
    def kept(self) -> int:
        """How many messages it is not known to have."""
        return len(self._sent) + len(self._unsent)

    def add(self, message: Packed) -> None:
        """To be sent, after all others."""
        self._unsent.append(message)
        self.size += len(message) + _EACH

    def next(self) -> Packed:
        """The next to be sent over this connection; kept until it is confirmed."""
        message = self._unsent.popleft()
        self._sent.append(message)
        return message

    def confirm(self, received: int) -> None:
        """The other side has so many. Raises WireError for a number that can't be."""
        if not self._first <= received <= self._first + len(self._sent):
            raise WireError(
                f"The other end says that it has {received} messages; {self._first} were confirmed and "
                f"{len(self._sent)} more sent."
            )
        for _ in range(received - self._first):
            self.size -= len(self._sent.popleft()) + _EACH
        self._first = received

    def again(self, received: int) -> None:
        """On a new connection, to a side that has so many: all others are to be sent again."""
        self.confirm(received)
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()


class Inbox:
    """How much has been received of one direction, and whether it is time to say so."""

    def __init__(self) -> None:
        self.received = 0
        self._said = 0
        self._bytes = 0

    def count(self, size: int) -> None:
        """One more, with a blob of `size` bytes."""
        self.received += 1
        self._bytes += size

    @property
    def due(self) -> bool:
        """Whether the other side should be told now rather than with the next heartbeat."""
        return self._bytes >= ACK_BYTES or self.received - self._said >= ACK_MESSAGES

    def say(self) -> int:
        """The number that is now being told."""
        self._said, self._bytes = self.received, 0
        return self.received
