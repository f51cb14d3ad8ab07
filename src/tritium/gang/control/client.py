"""The client connection of a supervisor to the coordinator; it reconnects when it breaks (supervisor)."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tritium.errors import WireError
from tritium.gang.control.session import GRACE, HEARTBEAT_SECONDS, SILENCE, TICK, Inbox, Outbox, late
from tritium.wire import Channel, Message, Packed, address_text

if TYPE_CHECKING:
    from tritium.tls import Certificate

ATTEMPT_SECONDS = 2.0
"""The limit of one attempt to connect, with its handshake."""
LONGEST_PAUSE = 0.5
"""The longest pause between two attempts to connect, in seconds."""
BYE_SECONDS = 2.0
"""The limit for `close` to wait until the coordinator has confirmed everything."""
OUTBOX_BYTES = 1 << 26
"""With so many unconfirmed bytes (or one larger message), senders wait."""


class Client:
    """A Channel that reconnects. Any thread may send; one thread at a time may `receive`.

    who     : describes this supervisor in messages.
    at_once : called from the client's own thread as `at_once(message, idle)`, it tells whether it has handled the
              message; `receive` returns the others. `idle` is true where no earlier message is waiting.
    certificate : the coordinator's, by which connections are encrypted; None: they are not.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        who: str,
        timeout: float,
        at_once: Callable[[Message, bool], bool] = lambda message, idle: False,
        certificate: Certificate | None = None,
    ) -> None:
        """Connect within `timeout` seconds. Raises WireError when no coordinator of this run answers."""
        self.reason: str | None = None
        """The reason why the session was closed; None before, and after `close`."""
        self._address = address
        self._secret = secret
        self._certificate = certificate
        self._who = who
        self._id = os.urandom(16).hex()
        self._changed = threading.Condition()
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._arrived: deque[Message] = deque()
        self._at_once = at_once
        self._idle = False
        """Whether a thread waits in `receive`, so that it has handled every message it got."""
        self._closed = False
        self._closing = False
        self._channel: Channel | None = None
        self._sending = False
        """Whether some thread is sending the messages of the outbox."""
        self._heard = self._sent = self._known = time.monotonic()
        """Monotonic times: of the last byte received, of the last one sent, when the coordinator last heard us."""
        channel = self._connect(time.monotonic() + timeout)
        self.addresses = channel.addresses
        self._threads = [
            threading.Thread(target=self._read, args=(channel,), name=f"tritium-client-in-{who}", daemon=True),
            threading.Thread(target=self._write, name=f"tritium-client-out-{who}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ---- Called by other threads

    def send(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        """Send a message. Waits while OUTBOX_BYTES are unconfirmed. Raises WireError when the session is closed."""
        self.pass_on(Message(kind, fields, blob))

    def pass_on(self, message: Message) -> None:
        """Send a message unchanged; see `send`."""
        packed = Packed.of(message)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._outbox.size == 0 or self._outbox.size + len(packed) <= OUTBOX_BYTES
            )
            if self._closed or self._closing:
                raise WireError(f"The other end is gone: {self.reason or 'this connection was closed'}.")
            self._outbox.add(packed)
            if self._sending or self._channel is None:
                return  # The thread that sends, or reconnects, sends this message, too.
            self._sending = True
        self._send_all()

    def receive(self) -> Message | None:
        """Return the next message, or None when the session is closed; then `reason` says why."""
        with self._changed:
            self._idle = not self._arrived
            self._changed.wait_for(lambda: self._arrived or self._closed)
            self._idle = False
            return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        """Send `bye`, wait up to BYE_SECONDS until everything is confirmed, disconnect, and join the threads."""
        with self._changed:
            if not self._closed and not self._closing:
                self._closing = True
                self._outbox.add(Packed.of(Message("bye")))
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or not self._outbox.kept, BYE_SECONDS)
        self._end(None)
        for thread in self._threads:
            thread.join()

    # ---- Threads

    def _end(self, reason: str | None) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self.reason = None if self._closing else reason
            if self._channel is not None:
                self._channel.hang_up()
            self._changed.notify_all()

    def _read(self, channel: Channel) -> None:
        """Receive, and reconnect when the connection breaks, until the coordinator is gone or ends the session."""
        try:
            while True:
                try:
                    self._listen(channel)
                finally:
                    with self._changed:
                        self._channel = None
                    channel.close()
                channel = self._connect(self._known + GRACE)
        except WireError as error:
            self._end(str(error))
        finally:
            self._end("its thread has failed")  # After an unexpected error, so that no thread waits for ever.

    def _listen(self, channel: Channel) -> None:
        """Receive until this connection breaks."""
        while not self._closed:
            began = time.monotonic()
            try:
                messages = channel.take(TICK)
                if messages is None:
                    return
                self._heard = time.monotonic()
                self._take(messages)
            except TimeoutError:
                now = time.monotonic()
                if now - began > 2 * TICK:  # This process itself was stopped, and could not receive.
                    self._heard = self._known = now
                if now - self._heard > SILENCE:
                    return
            except WireError:  # It is damaged or not authentic, and unreceived messages are sent again.
                return

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            counted = idle = False
            with self._changed:
                if message.kind == "closed":
                    self._end(str(message["reason"]))
                elif message.kind == "heartbeat":
                    self._known = max(self._known, time.monotonic() - late(float(message["unheard"])))
                    waiting = self._outbox.size
                    self._outbox.confirm(int(message["received"]))
                    if waiting > self._outbox.size:
                        self._changed.notify_all()
                else:
                    self._known = time.monotonic()
                    self._inbox.count(len(message.blob))
                    counted, idle = True, self._idle and not self._arrived
                    if self._inbox.due:
                        self._changed.notify_all()
            if counted and not self._at_once(message, idle):
                with self._changed:
                    self._arrived.append(message)
                    self._changed.notify_all()

    def _connect(self, deadline: float) -> Channel:
        """Connect, or reconnect, this session. Raises WireError when that fails until `deadline` (monotonic)."""
        pause = 0.0
        while True:
            if self._closed:
                raise WireError("This connection was closed.")
            try:
                return self._try_to_connect(min(ATTEMPT_SECONDS, max(TICK, deadline - time.monotonic())))
            except WireError as error:
                if isinstance(error, Refused) or time.monotonic() + pause > deadline:
                    raise
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause * random.uniform(0.5, 1))
            pause = min(LONGEST_PAUSE, max(0.05, pause * 2))

    def _try_to_connect(self, seconds: float) -> Channel:
        channel = Channel.connect(self._address, self._secret, seconds, self._certificate)
        try:
            channel.send("session", id=self._id, who=self._who, first=self._outbox.first, received=self._inbox.received)
            messages: list[Message] = []
            until = time.monotonic() + seconds
            while not messages:
                more = channel.take(max(0.0, until - time.monotonic()))
                if more is None:
                    raise WireError("The coordinator hung up.")
                messages += more
            answer = messages.pop(0)
            if answer.kind == "closed":
                raise Refused(str(answer["reason"]))
            with self._changed:
                self._heard = self._known = time.monotonic()
                self._outbox.resume(int(answer["received"]))
                self._channel = channel
                self._changed.notify_all()
            self._take(messages)
            return channel
        except TimeoutError as error:
            channel.close()
            raise WireError(f"The coordinator at {address_text(self._address)} is silent.") from error
        except BaseException:
            channel.close()
            raise

    def _write(self) -> None:
        """Send messages that a broken connection left, and heartbeats, every HEARTBEAT_SECONDS or when ACKs are due."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._is_idle and self._has_news), TICK)
                if self._closed:
                    return
                if not self._is_idle or not (self._has_news or time.monotonic() - self._sent >= HEARTBEAT_SECONDS):
                    continue
                self._sending = True
            self._send_all(heartbeat=True)

    @property
    def _is_idle(self) -> bool:
        return self._channel is not None and not self._sending

    @property
    def _has_news(self) -> bool:
        return bool(self._outbox) or self._inbox.due

    def _send_all(self, *, heartbeat: bool = False) -> None:
        """Send until the outbox is empty. One thread at a time, without holding the lock, as a send may block."""
        while True:
            with self._changed:
                channel = self._channel
                if channel is None or not (heartbeat or self._has_news):
                    self._sending = False
                    self._sent = time.monotonic()
                    return
                if heartbeat or self._inbox.due:
                    message = Packed.of(Message("heartbeat", {"received": self._inbox.acknowledge()}))
                else:
                    message = self._outbox.next()
                heartbeat = False
            try:
                channel.pass_on(message)
            except WireError:  # Unconfirmed messages are sent again on the next connection.
                with self._changed:
                    if self._channel is channel:
                        self._channel = None
                channel.hang_up()
            except BaseException:  # This thread stops sending, and others must not wait for it.
                self._end("its thread has failed")
                raise


class Refused(WireError):
    """The coordinator has answered, and refused this session."""
