"""Frames, codes and the handshake: what arrives is what was sent, or an error, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from program_state import default_timeout
from tritium.errors import TooLarge, WireError
from tritium.wire import CODE, MAGIC, MAX_BLOB, MAX_HEADER, NONCE, Challenge, Channel, Codec, Message, socket_at
from wire_messages import MESSAGES

KEY = b"k" * 32


def frame(message: Message, codec: Codec) -> bytes:
    return b"".join(codec.encode(message))


def stream(messages: list[Message], key: bytes | None = KEY, direction: bytes = b"c") -> bytes:
    codec = Codec(key, direction)
    return b"".join(frame(message, codec) for message in messages)


def read(data: bytes, key: bytes | None = KEY, direction: bytes = b"c") -> tuple[list[Message], WireError | None]:
    """Return what a receiver decodes from `data`, and the error that ended it, if any."""
    codec, seen = Codec(key, direction), []
    try:
        for message in codec.feed(data):
            seen.append(message)
    except WireError as error:
        return seen, error
    return seen, None


values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
messages = st.builds(
    Message,
    st.text(min_size=1),
    st.dictionaries(st.text().filter(lambda name: name != "kind"), values, max_size=4),
    st.binary(max_size=300),
)


class TestFrames:
    @given(st.lists(messages, max_size=5), st.lists(st.integers(1, 200), min_size=1), st.sampled_from([KEY, None]))
    def test_arrive_as_sent_however_the_network_cuts_them(
        self, sent: list[Message], cuts: list[int], key: bytes | None
    ) -> None:
        data, codec, seen, start = stream(sent, key), Codec(key, b"c"), [], 0
        while start < len(data):
            size = cuts[start % len(cuts)]
            seen += list(codec.feed(data[start : start + size]))
            start += size
        assert seen == sent

    def test_a_large_blob_is_sent_in_parts_and_read_as_one(self) -> None:
        message = Message("store", {"name": "w"}, bytes(1 << 20))
        parts = Codec(KEY, b"c").encode(message)
        assert len(parts) == 3
        assert parts[1] is message.blob
        assert read(b"".join(parts)) == ([message], None)

    def test_a_missing_field_is_named(self) -> None:
        with pytest.raises(WireError, match="'hello' message lacks the field 'launch'"):
            Message("hello")["launch"]

    @pytest.mark.parametrize("header", [b"[]", b'"x"', b"{}", b"{", b'{"kind": 3}', b"\xff\xfe", b"[" * 100_000, b""])
    def test_a_header_that_is_no_message_is_refused(self, header: bytes) -> None:
        seen, error = read(struct.pack("!II", len(header), 0) + header, key=None)
        assert (seen, str(error).startswith("A frame's ")) == ([], True)


class TestBounds:
    @pytest.mark.parametrize(
        "message", [Message("x", {"text": "a" * MAX_HEADER}), Message("x", {}, bytes(MAX_BLOB + 1))]
    )
    def test_too_much_is_not_sent(self, message: Message) -> None:
        with pytest.raises(TooLarge, match=r"'x' message of [\d,]+ \+ [\d,]+ bytes is over the limit"):
            Codec(KEY, b"c").encode(message)

    @pytest.mark.parametrize("lengths", [(MAX_HEADER + 1, 0), (0, MAX_BLOB + 1), (2**32 - 1, 2**32 - 1)])
    def test_an_announcement_of_too_much_is_refused_before_it_comes(self, lengths: tuple[int, int]) -> None:
        seen, error = read(struct.pack("!II", *lengths))
        assert seen == []
        assert "over the limit" in str(error)


class TestCodes:
    def test_a_frame_sent_again_is_refused(self) -> None:
        first = stream(MESSAGES[:1])
        seen, error = read(first + first)
        assert seen == MESSAGES[:1]
        assert "authentication code is wrong" in str(error)

    def test_frames_in_another_order_are_refused(self) -> None:
        codec = Codec(KEY, b"c")
        first, second = frame(MESSAGES[0], codec), frame(MESSAGES[2], codec)
        assert read(first + second)[1] is None
        seen, error = read(second + first)
        assert (seen, error is None) == ([], False)

    def test_a_frame_left_out_is_noticed(self) -> None:
        codec = Codec(KEY, b"c")
        first, _, third = (frame(message, codec) for message in MESSAGES[:3])
        seen, error = read(first + third)
        assert (seen, error is None) == (MESSAGES[:1], False)

    def test_a_frame_sent_back_to_its_sender_is_refused(self) -> None:
        assert read(stream(MESSAGES[:1], direction=b"c"), direction=b"s")[1] is not None

    def test_a_frame_of_another_connection_is_refused(self) -> None:
        assert read(stream(MESSAGES[:1], key=b"x" * 32))[1] is not None
        assert read(stream(MESSAGES[:1], key=None) + bytes(CODE))[1] is not None


class TestChallenge:
    def test_needs_the_secret(self) -> None:
        challenge = Challenge(b"secret")
        with pytest.raises(WireError, match="did not prove"):
            challenge.answer(bytes(Challenge.size))

    def test_an_answer_overheard_does_not_open_another_connection(self) -> None:
        overheard: list[bytes] = []
        with server(coordinator(b"secret", overheard)) as address:
            Channel.connect(address, b"secret", 5).close()
        assert len(overheard[0]) == Challenge.size
        with pytest.raises(WireError, match="did not prove"):
            Challenge(b"secret").answer(overheard[0])


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Yield the address of a server whose one connection a function serves in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            client, _ = listening.accept()
            with client, contextlib.suppress(ConnectionError):  # the client hangs up as soon as it knows
                serve(client)

        thread = threading.Thread(target=run)
        thread.start()
        yield listening.getsockname()
        thread.join(10)


def coordinator(secret: bytes, overheard: list[bytes]) -> Callable[[socket.socket], None]:
    def serve(client: socket.socket) -> None:
        challenge = Challenge(secret)
        client.sendall(challenge.greeting)
        overheard.append(client.recv(Challenge.size, socket.MSG_WAITALL))
        client.sendall(challenge.answer(overheard[0])[0])
        client.recv(1)

    return serve


def says(data: bytes) -> Callable[[socket.socket], None]:
    def serve(client: socket.socket) -> None:
        client.sendall(data)
        client.recv(4096)

    return serve


class TestConnect:
    def test_no_one_listens(self) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            with pytest.raises(WireError, match=r"No coordinator answers at 127\.0\.0\.1:\d+"):
                Channel.connect(bound.getsockname(), b"secret", 2)

    def test_something_else_listens(self) -> None:
        answer = says(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 40)
        with server(answer) as address, pytest.raises(WireError, match="is no coordinator"):
            Channel.connect(address, b"secret", 5)

    def test_a_coordinator_without_the_secret_is_left(self) -> None:
        impostor = says(MAGIC + bytes(NONCE) + bytes(CODE))
        with server(impostor) as address, pytest.raises(WireError, match="is not this run's"):
            Channel.connect(address, b"secret", 5)

    def test_it_hangs_up(self) -> None:
        with server(lambda client: client.sendall(MAGIC)) as address, pytest.raises(WireError, match="closed during"):
            Channel.connect(address, b"secret", 5)

    def test_it_says_nothing(self) -> None:
        with server(says(b"")) as address, pytest.raises(WireError, match="broke off"):
            Channel.connect(address, b"secret", 0.2)


class TestChannel:
    def test_any_thread_may_send(self) -> None:
        ours, theirs = socket.socketpair()
        left, right = Channel(ours, KEY, side=b"c"), Channel(theirs, KEY, side=b"s")

        def send(number: int) -> None:
            for k in range(50):
                left.send("part", bytes([number]) * 40_000, number=number, k=k)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        seen: dict[int, list[int]] = {}
        for _ in range(200):
            message = right.receive()
            assert message is not None
            assert message.blob == bytes([message["number"]]) * 40_000
            seen.setdefault(message["number"], []).append(message["k"])
        for thread in threads:
            thread.join()
        assert seen == {number: list(range(50)) for number in range(4)}
        left.close()
        assert right.receive() is None
        with pytest.raises(WireError, match="other end is gone"):
            right.send("late")
        right.close()

    def test_a_message_is_json_and_never_unpickled(self) -> None:
        header = json.dumps({"kind": "x"}).encode()
        blob = b"cos\nsystem\n(S'touch /tmp/pwned'\ntR."
        data = struct.pack("!II", len(header), len(blob)) + header + blob
        assert read(data, key=None) == ([Message("x", {}, blob)], None)


def test_a_descriptor_that_is_looked_at_stays_as_it_is_and_leaves_none_open() -> None:
    before = set(os.listdir("/dev/fd"))
    with socket.create_server(("127.0.0.1", 0)) as server, open(os.devnull) as none:
        with default_timeout(), socket_at(server.fileno()) as found:
            assert found.getsockname() == server.getsockname()
            assert os.get_blocking(server.fileno())
        with pytest.raises(OSError, match="socket"):
            socket_at(none.fileno())
    assert set(os.listdir("/dev/fd")) == before
