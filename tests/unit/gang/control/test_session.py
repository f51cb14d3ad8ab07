"""Messages that outlive their connection: each is delivered once and in order, whatever breaks in between."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import wait
from control_server import SECONDS, SECRET, Serving
from proxy import Proxy
from tritium.errors import TooLarge, WireError
from tritium.gang.control import client as client_module
from tritium.gang.control import connection as connection_module
from tritium.gang.control import server as server_module
from tritium.gang.control.client import Client
from tritium.gang.control.session import ACK_BYTES, ACK_MESSAGES, Inbox, Outbox
from tritium.gang.driver.certificate import new_certificate
from tritium.wire import Channel, Message, Packed


def packed(number: int) -> Packed:
    return Packed.of(Message("x", {"number": number}))


class TestOutbox:
    @given(st.lists(st.sampled_from(["add", "send", "arrive", "confirm", "break"]), max_size=80))
    def test_everything_arrives_once_and_in_order(self, steps: list[str]) -> None:
        """`wire` is what has left and not arrived; a break loses it."""
        outbox, inbox = Outbox(), Inbox()
        wire: list[Packed] = []
        arrived: list[Packed] = []
        added = 0
        for step in [*steps, "break", *["send", "arrive"] * len(steps)]:
            if step == "add":
                outbox.add(packed(added))
                added += 1
            elif step == "send" and outbox:
                wire.append(outbox.next())
            elif step == "arrive" and wire:
                arrived.append(wire.pop(0))
                inbox.count(0)
            elif step == "confirm":
                outbox.confirm(inbox.received)
            elif step == "break":
                wire.clear()
                outbox.resume(inbox.received)
        assert arrived == [packed(number) for number in range(added)]
        outbox.confirm(added)
        assert (outbox.size, outbox.kept, outbox.first, bool(outbox)) == (0, 0, added, False)

    @pytest.mark.parametrize("received", [-1, 0, 3, 1 << 70])
    def test_a_number_that_cant_be_is_an_error(self, received: int) -> None:
        outbox = Outbox()
        for number in range(3):
            outbox.add(packed(number))
        outbox.next()
        outbox.next()
        outbox.confirm(1)
        with pytest.raises(WireError, match=rf"says that it has {received} messages; 1 were confirmed and 1 more sent"):
            outbox.confirm(received)

    def test_what_is_kept_is_counted(self) -> None:
        outbox = Outbox()
        outbox.add(Packed(b"header", bytes(1000)))
        assert 1000 < outbox.size < 2000

    @pytest.mark.timeout(90)  # seconds; in quadratic time it would be hours
    def test_many_are_kept_and_sent_again_quickly(self) -> None:
        outbox, count = Outbox(), 200_000
        for number in range(count):
            outbox.add(packed(number))
        for _ in range(3):
            while outbox:
                outbox.next()
            outbox.resume(0)
        assert outbox.kept == count


class TestInbox:
    def test_says_when_it_is_time_to_confirm(self) -> None:
        inbox = Inbox()
        inbox.count(ACK_BYTES - 1)
        assert not inbox.due
        inbox.count(1)
        assert inbox.due
        assert (inbox.acknowledge(), inbox.due) == (2, False)
        for _ in range(ACK_MESSAGES):
            assert not inbox.due
            inbox.count(0)
        assert inbox.due


@pytest.fixture(params=[None, new_certificate()], ids=["plain", "TLS"])
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    with Serving(request.param) as server:
        yield server


@pytest.fixture
def proxy(serving: Serving) -> Iterator[Proxy]:
    made = Proxy(serving.server.address)
    yield made
    made.close()


@pytest.fixture
def soon_broken(monkeypatch: pytest.MonkeyPatch) -> float:
    """Return after how many seconds without a byte a connection is broken in this test: half of the usual."""
    seconds = client_module.SILENCE / 2
    for module in (client_module, server_module):
        monkeypatch.setattr(module, "SILENCE", seconds)
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.2)
    return seconds


class TestConnection:
    def test_messages_of_all_sizes_through_a_network_that_breaks(self, serving: Serving, proxy: Proxy) -> None:
        chance = random.Random(5)
        sizes = [chance.choice([0, 10, 70_000, 3 << 20]) for _ in range(60)]
        longest = 0.1 if serving.certificate is None else 0.3  # Its handshake takes more ways there and back.
        with serving.line(proxy.address) as ours, proxy.cutting(chance, 0.005, longest):
            for number, size in enumerate(sizes):
                ours.send("echo", bytes([number]) * size, number=number)
                if number % 3 == 0:
                    time.sleep(0.02)
            for number, size in enumerate(sizes):
                message = ours.receive()
                assert message is not None, ours.reason
                assert (message["number"], message.blob) == (number, bytes([number]) * size)
            serving.until(60)
        assert [message["number"] for message in serving.heard] == list(range(60))
        serving.until_goodbye()
        assert serving.connections > 2

    def test_heartbeats_keep_it_and_confirm(self, soon_broken: float, serving: Serving) -> None:
        with serving.line() as ours:
            ours.send("echo", number=0)
            time.sleep(soon_broken + 1.0)  # longer than either end would stay with a silent one
            assert ours._outbox.kept == 0
            (session,) = serving.server.sessions.values()
            assert session.outbox.kept == 0
            assert ours.receive() == Message("echoed", {"number": 0})
        assert serving.connections == 1

    def test_a_callback_that_takes_long_breaks_nothing(self, soon_broken: float, serving: Serving) -> None:
        with serving.line() as ours:
            ours.send("sleep", seconds=soon_broken + 1.0)
            ours.send("echo", number=1)
            assert ours.receive() == Message("echoed", {"number": 1})
        serving.until_goodbye()
        assert serving.connections == 1

    def test_senders_wait_while_too_much_is_unconfirmed(
        self, serving: Serving, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_module, "OUTBOX_BYTES", 100_000)
        with serving.line(proxy.address) as ours:
            proxy.refuse()
            sent: list[int] = []

            def send() -> None:
                for number in range(40):
                    ours.send("part", bytes(10_000), number=number)
                    sent.append(number)

            thread = threading.Thread(target=send)
            thread.start()
            wait(lambda: len(sent) == 9, "nine fit")
            time.sleep(0.2)
            assert (len(sent), thread.is_alive()) == (9, True)
            proxy.refuse(False)
            thread.join(SECONDS)
            serving.until(40)
        assert [message["number"] for message in serving.heard] == list(range(40))

    def test_one_message_may_be_larger_than_what_is_kept(
        self, serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_module, "OUTBOX_BYTES", 1000)
        with serving.line() as ours:
            for number in range(3):
                ours.send("large", bytes(100_000), number=number)
            serving.until(3)

    def test_a_message_over_the_limit_is_refused_before_it_is_kept(self, serving: Serving) -> None:
        with serving.line() as ours:
            with pytest.raises(TooLarge, match="over the limit"):
                ours.send("x", text="a" * (1 << 21))
            ours.send("echo", number=1)
            assert ours.receive() == Message("echoed", {"number": 1})

    def test_a_supervisor_that_takes_nothing_is_given_up(
        self, serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection_module, "OUTBOX_BYTES", 1 << 20)
        channel = Channel.connect(serving.server.address, SECRET, SECONDS, serving.certificate)
        channel.send("session", id="i", who="a test", first=0, received=0)
        with contextlib.suppress(WireError):  # it hears of it
            for number in range(30):  # as long as nothing is confirmed, all is kept
                channel.send("echo", bytes(100_000), number=number)
        with serving.changed:
            assert serving.changed.wait_for(lambda: serving.gone, SECONDS)
        assert serving.gone[0].startswith("it has not taken 1,1")
        channel.close()

    def test_goodbye_is_heard_through_a_broken_connection(self, serving: Serving, proxy: Proxy) -> None:
        ours = serving.client(proxy.address)
        proxy.freeze()
        ours.send("last", bytes(1000))
        threading.Timer(0.3, lambda: (proxy.cut(), proxy.freeze(False))).start()
        ours.close()
        serving.until(1)
        serving.until_goodbye()

    def test_closing_is_quick_when_no_one_is_there(self, serving: Serving, proxy: Proxy) -> None:
        ours = serving.client(proxy.address)
        proxy.refuse()
        began = time.monotonic()
        ours.close()
        assert time.monotonic() - began < SECONDS

    def test_the_end_of_the_server_is_the_end_of_its_connections(self, serving: Serving) -> None:
        ours = serving.client()
        began = time.monotonic()
        serving.close()
        assert ours.receive() is None
        assert ours.reason == server_module.RUN_ENDED
        ours.close()
        assert time.monotonic() - began < SECONDS

    def test_without_the_secret_it_is_not_made(self, serving: Serving) -> None:
        with pytest.raises(WireError, match=r"closed during the handshake|broke off"):
            Client(serving.server.address, b"a guess", "a stranger", 0.5, certificate=serving.certificate)

    def test_where_no_one_listens_it_is_not_made(self) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            with pytest.raises(WireError, match=r"No coordinator answers at 127\.0\.0\.1"):
                Client(bound.getsockname(), SECRET, "a test", 0.5)

    def test_a_server_that_comes_late_is_found(self) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            timer = threading.Timer(0.5, lambda: bound.listen())
            timer.start()
            with pytest.raises(WireError, match=r"broke off|silent"):
                Client(bound.getsockname(), SECRET, "a test", 1.5)
            timer.join()


class TestReturn:
    def opened(self, serving: Serving, **fields: Any) -> Message:
        channel = Channel.connect(serving.server.address, SECRET, SECONDS, serving.certificate)
        channel.send("session", **{"id": "i", "who": "a test", "first": 0, "received": 0, **fields})
        answer = channel.receive()
        channel.close()
        assert answer is not None
        return answer

    def test_to_a_server_that_never_knew_it(self, serving: Serving) -> None:
        assert self.opened(serving, first=3).kind == "closed"
        assert self.opened(serving, received=3).kind == "closed"
        assert serving.broken == [f"a test came back, but {server_module.RUN_ENDED}."] * 2

    def test_after_it_was_given_up(self, serving: Serving) -> None:
        assert self.opened(serving).kind == "session"
        serving.server.call(lambda: serving.server.give_up(serving.server.sessions["i"], "nothing was heard of it"))
        assert self.opened(serving) == Message("closed", {"reason": "nothing was heard of it"})

    def test_the_newer_connection_counts(self, serving: Serving) -> None:
        first = Channel.connect(serving.server.address, SECRET, SECONDS, serving.certificate)
        first.send("session", id="i", who="a test", first=0, received=0)
        first.send("echo", number=0)
        assert [message.kind for message in (first.receive(), first.receive()) if message] == ["session", "echoed"]
        assert self.opened(serving) == Message("session", {"received": 1})
        assert first.receive() is None
        first.close()
        assert serving.gone == []
        assert len(serving.server.sessions) == 1

    def test_reconnects_are_refused(self, serving: Serving) -> None:
        self.opened(serving)
        serving.server.call(serving.server.refuse_reconnects)
        with serving.changed:
            assert serving.changed.wait_for(lambda: serving.gone == ["its connection broke"], SECONDS)
