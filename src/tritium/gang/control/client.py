"""A supervisor's line to the coordinator, which is made again when it breaks (supervisor)."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tritium.errors import WireError
from tritium.gang.control.session import GRACE, HEARTBEAT_SECONDS, SILENCE, TICK, Inbox, Outbox, late
from tritium.wire import Channel, Message, Packed

ATTEMPT_SECONDS = 2.0  # for one attempt to connect, with its handshake
LONGEST_PAUSE = 0.5  # between two attempts
BYE_SECONDS = 2.0  # how long `close` waits until the coordinator has heard everything
OUTBOX_BYTES = 1 << 26  # kept for sending again, at most; one message may be larger. Then senders wait.


class Client:
    """Like a Channel, but it survives its connection. Any thread may send; one thread at a time may `receive`.

    `who` is for people: which supervisor of which run this is. `at_once(message, idle)` is asked from the line's own
    thread whether it has dealt with a message; if not, `receive` gives it. `idle`: all earlier ones are dealt with.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        who: str,
        timeout: float,
        at_once: Callable[[Message, bool], bool] = lambda message, idle: False,
    ) -> None:
        """Connect within `timeout` seconds. Raises WireError when no coordinator of this run answers."""
        self.reason: str | None = None  # why this line is over; None as long as it is not, and after `close`
        self._address = address
        self._secret = secret
        self._who = who
        self._id = os.urandom(16).hex()
        self._changed = threading.Condition()
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._arrived: deque[Message] = deque()
        self._at_once = at_once
        self._idle = False  # a thread waits in `receive`: it has dealt with all that it was given
        self._over = False
        self._leaving = False
        self._channel: Channel | None = None
        self._sending = False  # some thread sends what is in the outbox
        self._heard = self._sent = self._known = time.monotonic()
        """When a byte came last, when one was sent, and when the coordinator is known to have heard of this end."""
        channel = self._reach(time.monotonic() + timeout)
        self.addresses = channel.addresses
        self._threads = [
            threading.Thread(target=self._read, args=(channel,), name=f"tritium-line-in-{who}", daemon=True),
            threading.Thread(target=self._write, name=f"tritium-line-out-{who}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ---- what other threads call

    def send(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        """Have a message sent; waits while too much is unconfirmed. Raises WireError when the coordinator is gone."""
        self.pass_on(Message(kind, fields, blob))

    def pass_on(self, message: Message) -> None:
        """Have a message sent as it came."""
        packed = Packed.of(message)
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or self._outbox.size == 0 or self._outbox.size + len(packed) <= OUTBOX_BYTES
            )
            if self._over or self._leaving:
                raise WireError(f"The other end is gone: {self.reason or 'this line was closed'}.")
            self._outbox.add(packed)
            if self._sending or self._channel is None:
                return  # whoever sends, or connects again, goes on with this one
            self._sending = True
        self._send_all()

    def receive(self) -> Message | None:
        """The next message, or None when there will be no more; then `reason` says why."""
        with self._changed:
            self._idle = not self._arrived
            self._changed.wait_for(lambda: self._arrived or self._over)
            self._idle = False
            return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        """Say goodbye, wait until the coordinator has heard it and all before it, and hang up."""
        with self._changed:
            if not self._over and not self._leaving:
                self._leaving = True
                self._outbox.add(Packed.of(Message("bye")))
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._over or not self._outbox.kept, BYE_SECONDS)
        self._end(None)
        for thread in self._threads:
            thread.join()

    # ---- threads

    def _end(self, reason: str | None) -> None:
        with self._changed:
            if not self._over:
                self._over = True
                self.reason = None if self._leaving else reason
            if self._channel is not None:
                self._channel.hang_up()
            self._changed.notify_all()

    def _read(self, channel: Channel) -> None:
        """Receive; connect again when the connection breaks; end when the coordinator is gone, or says so."""
        try:
            while True:
                try:
                    self._listen(channel)
                finally:
                    with self._changed:
                        self._channel = None
                    channel.close()
                channel = self._reach(self._known + GRACE)
        except WireError as error:
            self._end(str(error))
        finally:
            self._end("its thread has failed")  # then no one shall wait for it

    def _listen(self, channel: Channel) -> None:
        """Until this connection is broken."""
        while not self._over:
            began = time.monotonic()
            try:
                messages = channel.take(TICK)
                if messages is None:
                    return
                self._heard = time.monotonic()
                self._take(messages)
            except TimeoutError:
                now = time.monotonic()
                if now - began > 2 * TICK:  # this process itself stood still, and could hear no one
                    self._heard = self._known = now
                if now - self._heard > SILENCE:
                    return
            except WireError:  # damaged, or a stranger's: what was not received will be sent again
                return

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            counted = idle = False
            with self._changed:
                if message.kind == "over":
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

    def _reach(self, deadline: float) -> Channel:
        """A connection on which this session goes on. Raises WireError when there is none before `deadline`."""
        pause = 0.0
        while True:
            if self._over:
                raise WireError("This line was closed.")
            try:
                return self._attempt(min(ATTEMPT_SECONDS, max(TICK, deadline - time.monotonic())))
            except WireError as error:
                if isinstance(error, Refused) or time.monotonic() + pause > deadline:
                    raise
            with self._changed:
                self._changed.wait_for(lambda: self._over, pause * random.uniform(0.5, 1))
            pause = min(LONGEST_PAUSE, max(0.05, pause * 2))

    def _attempt(self, seconds: float) -> Channel:
        channel = Channel.connect(self._address, self._secret, seconds)
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
            if answer.kind == "over":
                raise Refused(str(answer["reason"]))
            with self._changed:
                self._heard = self._known = time.monotonic()
                self._outbox.again(int(answer["received"]))
                self._channel = channel
                self._changed.notify_all()
            self._take(messages)
            return channel
        except TimeoutError as error:
            channel.close()
            raise WireError(f"The coordinator at {self._address[0]}:{self._address[1]} is silent.") from error
        except BaseException:
            channel.close()
            raise

    def _write(self) -> None:
        """Send what a broken connection has left, and a heartbeat after a while without any, or when much has come."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or (self._is_idle and self._has_news), TICK)
                if self._over:
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
        """Send until there is nothing left. One thread at a time, without the lock: a send may take long."""
        while True:
            with self._changed:
                channel = self._channel
                if channel is None or not (heartbeat or self._has_news):
                    self._sending = False
                    self._sent = time.monotonic()
                    return
                if heartbeat or self._inbox.due:
                    message = Packed.of(Message("heartbeat", {"received": self._inbox.say()}))
                else:
                    message = self._outbox.next()
                heartbeat = False
            try:
                channel.pass_on(message)
            except WireError:  # what was not confirmed is sent again over the next connection
                with self._changed:
                    if self._channel is channel:
                        self._channel = None
                channel.hang_up()
            except BaseException:  # no one sends any more: it must not look as if someone did
                self._end("its thread has failed")
                raise


class Refused(WireError):
    """The coordinator has answered, and does not want this session."""
