"""Messages between coordinator, supervisor and rank process (any process).

A frame is two lengths, a JSON header, a blob of opaque bytes and, across a network without TLS, a code:

    u32 header length | u32 blob length | header | blob | HMAC-SHA256 of (direction, sequence number, frame)

Nothing that arrives is unpickled here; a blob is passed on unchanged. Both ends are authenticated by the run's secret
before the first frame (a challenge each), and the codes use a key of this connection alone, so that a frame can be
neither forged, changed, dropped, reordered nor replayed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tritium.errors import MALFORMED, TooLarge, WireError

if TYPE_CHECKING:
    from tritium.tls import Certificate, Tls

MAX_HEADER = 1 << 20
MAX_BLOB = 1 << 28
CHUNK = 1 << 22  # Large values are sent in pieces of this size, so that other messages get in between.
PIECE = 1 << 18
"""The most bytes that are received, or encrypted, at once: no connection holds an encrypted copy of a large blob."""

WAITING = 1024
"""Connections that may wait for a server, while it starts."""
_CLAIM_SECONDS = 5.0
"""The limit from the name of a server's socket being taken to its first connection."""
_NOTE_BYTES = 64
"""Bytes for the note of how much was left out of a text."""

MAGIC = b"TRITIUM1"
NONCE = 32
CODE = 32
_LENGTHS = struct.Struct("!II")
_SEQUENCE = struct.Struct("!Q")


@dataclass(frozen=True)
class Message:
    """One frame: its kind, its fields (JSON), and bytes that only its last receiver reads.

    Indexing returns a field. Raises WireError where the message has none of that name.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    blob: bytes = b""

    def __getitem__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise WireError(f"A {self.kind!r} message lacks the field {name!r}.") from None

    def parts(self) -> list[bytes]:
        """Return the blob in pieces of the field `lengths`, as the answer to an all-gather holds the ranks' values.

        Raises WireError where they are not lengths that make up the blob.
        """
        parts, start, lengths = [], 0, self["lengths"]
        whole = isinstance(lengths, list) and all(type(length) is int and length >= 0 for length in lengths)
        if not whole or sum(lengths) != len(self.blob):
            raise WireError(f"A {self.kind!r} message of {len(self.blob):,} bytes has the lengths {lengths!r:.100}.")
        for length in lengths:
            parts.append(self.blob[start : start + length])
            start += length
        return parts


@dataclass(frozen=True)
class Packed:
    """A message encoded for any connection: its header as bytes, and its blob, which is not copied."""

    header: bytes
    blob: bytes = b""

    @classmethod
    def of(cls, message: Message) -> Packed:
        """Encode a message. Raises TooLarge for one over MAX_HEADER or MAX_BLOB."""
        header = json.dumps({"kind": message.kind, **message.fields}, separators=(",", ":")).encode()
        if len(header) > MAX_HEADER or len(message.blob) > MAX_BLOB:
            raise TooLarge(
                f"A {message.kind!r} message of {len(header):,} + {len(message.blob):,} bytes is over the limit of "
                f"{MAX_HEADER:,} + {MAX_BLOB:,} bytes.",
                kind=message.kind,
                size=len(header) + len(message.blob),
                limit=MAX_HEADER if len(header) > MAX_HEADER else MAX_BLOB,
            )
        return cls(header, message.blob)

    def __len__(self) -> int:
        return len(self.header) + len(self.blob)


def escaped(text: str) -> int:
    """Return the bytes that `text` takes in a header: up to 12 for one character."""
    return len(json.dumps(text)) - 2


def clip(text: str, limit: int) -> str:
    """Return `text`, or its beginning and its end, in at most `limit` bytes of a header."""
    if len(text) <= limit and escaped(text) <= limit:
        return text
    half = max(0, limit - _NOTE_BYTES) // 2
    head = _fitting(text[:half], half, first=True)
    tail = _fitting(text[len(text) - half :], half, first=False)
    word = f" … [{len(text) - len(head) - len(tail):,} characters left out] … "
    return f"{head}{word}{tail}" if escaped(word) <= limit else ""


def _fitting(text: str, limit: int, *, first: bool) -> str:
    while (size := escaped(text)) > limit:
        keep = len(text) * limit // size
        text = text[:keep] if first else text[len(text) - keep :]
    return text


class Codec:
    """The frames of one direction: `encode` what is sent, or `feed` what arrives.

    key       : the key of the connection; None for frames without codes.
    direction : part of the codes, so that no frame is valid the other way.
    """

    def __init__(self, key: bytes | None, direction: bytes) -> None:
        self._key = key
        self._direction = direction
        self._sequence = 0
        self._buffer = bytearray()

    def _code(self, *parts: bytes | memoryview) -> bytes:
        if self._key is None:
            return b""
        code = hmac.new(self._key, self._direction + _SEQUENCE.pack(self._sequence), hashlib.sha256)
        for part in parts:
            code.update(part)
        self._sequence += 1
        return code.digest()

    def encode(self, message: Message | Packed) -> list[bytes]:
        """Return the frame in parts, to be sent one after the other; a large blob is not copied. Raises TooLarge."""
        packed = message if isinstance(message, Packed) else Packed.of(message)
        header, blob = packed.header, packed.blob
        lengths = _LENGTHS.pack(len(header), len(blob))
        code = self._code(lengths, header, blob)
        if len(blob) < 1 << 16:
            return [lengths + header + blob + code]
        return [lengths + header, blob, code]

    def feed(self, data: bytes | memoryview) -> Iterator[Message]:
        """Yield the messages that are complete once `data` has arrived.

        Raises WireError for a frame over the limits, with a wrong code, or whose header is no message.
        """
        self._buffer += data
        tail = 0 if self._key is None else CODE
        while len(self._buffer) >= _LENGTHS.size:
            header_size, blob_size = _LENGTHS.unpack_from(self._buffer)
            if header_size > MAX_HEADER or blob_size > MAX_BLOB:
                raise WireError(f"A frame announces {header_size:,} + {blob_size:,} bytes: over the limit.")
            body = _LENGTHS.size + header_size + blob_size
            if len(self._buffer) < body + tail:
                return
            with memoryview(self._buffer) as view:  # So a large blob is copied only once, out of the buffer.
                if not hmac.compare_digest(self._code(view[:body]), bytes(view[body : body + tail])):
                    raise WireError("A frame's authentication code is wrong.")
                header = bytes(view[_LENGTHS.size : _LENGTHS.size + header_size])
                blob = bytes(view[body - blob_size : body])
            del self._buffer[: body + tail]
            yield _message(header, blob)


def _message(header: bytes, blob: bytes) -> Message:
    try:
        fields = json.loads(header)
        kind = fields.pop("kind")
    except MALFORMED as error:
        raise WireError(f"A frame's header is no message: {header[:80]!r}.") from error
    if not isinstance(kind, str):
        raise WireError(f"A frame's kind is {kind!r}, not a name.")
    return Message(kind, fields, blob)


class Challenge:
    """The server's side of the authentication, without a socket: send `greeting`, then the result of `answer`."""

    size = NONCE + CODE
    """The bytes of the client's only packet."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = os.urandom(NONCE)
        self.greeting = MAGIC + self._nonce

    def answer(self, packet: bytes) -> tuple[bytes, bytes]:
        """Return the answer to send, and the connection's key. Raises WireError for a client without the secret."""
        theirs, proof = packet[:NONCE], packet[NONCE:]
        if not hmac.compare_digest(proof, _auth_code(self._secret, b"client", self._nonce, theirs)):
            raise WireError("A client did not prove that it knows this run's secret.")
        reply = _auth_code(self._secret, b"server", self._nonce, theirs)
        return reply, _auth_code(self._secret, b"key", self._nonce, theirs)


def _auth_code(secret: bytes, what: bytes, server: bytes, client: bytes) -> bytes:
    """Return the code of both nonces, which only an end that knows the secret can compute."""
    return hmac.digest(secret, what + server + client, "sha256")


def address_text(address: tuple[str, int]) -> str:
    """Format an address: `10.0.0.1:4000`, `[::1]:4000`."""
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"


class Channel:
    """A blocking end of a connection. Any thread may `send`; one thread at a time may `receive` or `take`.

    key  : the key of the connection; None for frames without codes, between processes of a host or under TLS.
    side : b"c" for the client's end, b"s" for the server's.
    tls  : encrypts the connection, its handshake complete; None: nothing does.
    """

    def __init__(
        self, sock: socket.socket, key: bytes | None = None, *, side: bytes = b"c", tls: Tls | None = None
    ) -> None:
        sock.settimeout(None)  # A program may set a default timeout for its own sockets.
        self._socket = sock
        self._tls = tls
        self._lock = threading.Lock()
        self._out = Codec(key, side)
        self._in = Codec(key, b"s" if side == b"c" else b"c")
        self._arrived: list[Message] = []

    @classmethod
    def connect(
        cls, address: tuple[str, int], secret: bytes, timeout: float, certificate: Certificate | None = None
    ) -> Channel:
        """Connect to a coordinator within `timeout` seconds, and authenticate both ends.

        certificate : the coordinator's, by which the connection is encrypted; None: it is not.

        Raises WireError where nothing answers at the address, or something else than this run's coordinator.
        """
        where = address_text(address)
        try:
            sock = socket.create_connection(address, timeout)
        except OSError as error:
            raise WireError(f"No coordinator answers at {where}: {error}.") from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = None
            if certificate is not None:
                tls, secret = certificate.connect(sock, f"What answers at {where}"), certificate.bound(secret)
            greeting = _exactly(sock, len(MAGIC) + NONCE, tls)
            if not greeting.startswith(MAGIC):
                raise WireError(f"What answers at {where} is no coordinator.")
            server, client = greeting[len(MAGIC) :], os.urandom(NONCE)
            packet = client + _auth_code(secret, b"client", server, client)
            sock.sendall(packet if tls is None else tls.sealed(packet))
            if not hmac.compare_digest(_exactly(sock, CODE, tls), _auth_code(secret, b"server", server, client)):
                raise WireError(f"The coordinator at {where} is not this run's.")
            sock.settimeout(None)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError) and not isinstance(error, WireError):
                raise WireError(f"The coordinator at {where} broke off: {error}.") from error
            raise
        return cls(sock, _auth_code(secret, b"key", server, client) if tls is None else None, tls=tls)

    @property
    def addresses(self) -> tuple[str, str]:
        """This end's and the other end's IP address."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def send(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        """Send one message. Raises WireError where the other end is gone, TooLarge for a message over the limit."""
        self.pass_on(Message(kind, fields, blob))

    def pass_on(self, message: Message | Packed) -> None:
        """Send a message that was received or is packed. Raises as `send` does."""
        with self._lock:
            try:
                for part in self._out.encode(message):
                    for piece in (part,) if self._tls is None else _sealed(self._tls, part):
                        self._socket.sendall(piece)
            except OSError as error:
                raise WireError(f"The other end is gone: {error}.") from error

    def receive(self) -> Message | None:
        """Return the next message, or None where the other end has closed. Raises WireError for other bytes."""
        while not self._arrived:
            try:
                data = self._socket.recv(PIECE)
            except OSError:
                return None
            if not data:
                return None
            self._arrived.extend(self._fed(data))
        return self._arrived.pop(0)

    def take(self, seconds: float) -> list[Message] | None:
        """Return the messages that are complete with the next bytes, if any; None where the other end has closed.

        Raises TimeoutError where no byte comes within `seconds`, and WireError for bytes that are no message.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise TimeoutError(f"The other end has said nothing for {seconds:g} s.")
        try:
            data = self._socket.recv(PIECE)
        except OSError:
            return None
        return list(self._fed(data)) if data else None

    def _fed(self, data: bytes) -> Iterator[Message]:
        return self._in.feed(data if self._tls is None else self._tls.opened(data))

    @property
    def has_room(self) -> bool:
        """Whether a small message can be sent without waiting for the other end to read."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(0))

    @property
    def is_silent(self) -> bool:
        """Whether no byte is there to receive, nor the other end closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def hang_up(self) -> None:
        """Shut the connection down: threads that wait in `receive`, `take` or `send` wake up."""
        with contextlib.suppress(OSError):  # The other end may have closed it.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down, and close the socket."""
        self.hang_up()
        with self._lock:  # A thread in `send` holds it, during which the descriptor must not be reused.
            self._socket.close()


def _sealed(tls: Tls, part: bytes) -> Iterator[bytes]:
    with memoryview(part) as view:
        for start in range(0, len(view), PIECE):
            yield tls.sealed(view[start : start + PIECE])


def _exactly(sock: socket.socket, size: int, tls: Tls | None) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data) if tls is None else PIECE)
        if not more:
            raise WireError("The connection was closed during the handshake.")
        data += more if tls is None else tls.opened(more)
    return data


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user id of the process at the other end of a Unix socket: the one that listens there."""
    pid, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def reach(name: str) -> tuple[socket.socket, socket.socket | None]:
    """Connect to the Unix socket of a server; where nobody listens, take its name, and return the listening socket too.

    name : in the abstract namespace of Linux: it begins with a zero byte, and ends with the last process that has the
           listening socket, with no file to remove.
    """
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(None)  # The program may have set a default timeout.
        listener = None
        try:
            connection.connect(name)
        except ConnectionRefusedError:
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(name)
                listener.listen(WAITING)
                connection.connect(name)
            except OSError as error:
                listener.close()
                connection.close()
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.001)  # Another process has taken the name, and no event tells when it listens.
                continue
        return connection, listener


def socket_at(descriptor: int) -> socket.socket:
    """Return a socket of a copy of this descriptor, which stays as it is. Raises OSError where it is no socket's."""
    copy = os.dup(descriptor)
    # With this type Python does not apply a default timeout of the program's, which would make both non-blocking.
    kind = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)
    try:
        return socket.socket(type=kind, fileno=copy)
    except OSError:
        os.close(copy)
        raise
