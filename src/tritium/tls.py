"""TLS 1.3 of a run's connections, with the run's own certificate (any process).

The certificate travels with the run's secret inside Spark's job, and a client accepts this one and no other. Who may
speak is decided by the secret, as without TLS; that bytes are neither changed nor left out, by TLS.
"""

from __future__ import annotations

import functools
import hmac
import ssl
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tritium.errors import WireError

if TYPE_CHECKING:
    import socket

_RECORD = 1 << 14
"""The most bytes of a record of TLS."""
_ROOM = (1 << 18) + _RECORD
"""The bytes for what is opened at once, and the rest of a record that came before."""


@dataclass(frozen=True)
class Certificate:
    """A run's certificate and the private key to it, both as PEM; the key is for the ends that listen."""

    public: str
    private: str = field(repr=False)

    def bound(self, secret: bytes) -> bytes:
        """Return the secret by which ends authenticate each other under this certificate.

        What an end says without TLS, to whoever asks, then proves nothing here.
        """
        return hmac.digest(secret, self.public.encode(), "sha256")

    def for_client(self) -> ssl.SSLContext:
        """Return the settings of a client, which accepts nothing but this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # The certificate has no name of a host: it is compared as a whole.
        context.load_verify_locations(cadata=self.public)
        return context

    def for_server(self) -> ssl.SSLContext:
        """Return the settings of a server, which shows this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # No connection is resumed.
        with tempfile.NamedTemporaryFile("w", prefix="tritium-") as file:  # Python reads keys from files alone.
            file.write(self.private + self.public)
            file.flush()
            context.load_cert_chain(file.name)
        return context

    def acceptor(self) -> Callable[[], Tls]:
        """Return a function that returns a server's end for each new connection; one thread may open all of them."""
        room = bytearray(_ROOM)
        return functools.partial(Tls, self.for_server(), "A client", room, server=True)

    def connect(self, sock: socket.socket, who: str) -> Tls:
        """Complete the handshake of a client over a blocking socket. Raises as `Tls.opened` does, and OSError.

        who : the other end, in messages.
        """
        tls = Tls(self.for_client(), who, bytearray(_ROOM))
        data = b""  # Nothing but the handshake comes before it is complete: the server waits for this end's last word.
        while True:
            try:
                tls.opened(data)
            finally:  # Also the alert that tells the other end why it is refused.
                sock.sendall(tls.sealed())
            if tls.ready:
                return tls
            if not (data := sock.recv(_RECORD)):
                raise WireError(f"{who} closed the connection during the handshake of TLS.")


class Tls:
    """One end of a connection. One thread may call `sealed` while another calls `opened`.

    A socket of `ssl` is not for two threads, one of which waits for bytes while the other sends. Here bytes come and go
    through memory, the caller sends and receives them, and a lock that is never held while waiting guards the rest.

    room : for what is opened. Those whose `opened` the same thread calls may share it.
    """

    def __init__(self, context: ssl.SSLContext, who: str, room: bytearray, *, server: bool = False) -> None:
        self.ready = False
        """Whether the handshake is complete, so that data can be sealed."""
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._arrived, self._leaving, server_side=server)
        self._who = who
        self._content = memoryview(room)
        self._lock = threading.Lock()

    def sealed(self, data: bytes | memoryview = b"") -> bytes:
        """Return the bytes to send for `data`, after those of the handshake that are due."""
        with self._lock:
            if data:
                self._object.write(data)
            return self._leaving.read()

    def opened(self, data: bytes) -> memoryview:
        """Return the content of the records that `data` completes; none where there is none yet.

        It is valid until the next call. Raises WireError for bytes that are no TLS or were changed, and for an end with
        another certificate.
        """
        size, most = 0, len(data) + _RECORD
        if most > len(self._content):
            self._content = memoryview(bytearray(most))
        try:
            with self._lock:
                self._arrived.write(data)
                if not self.ready:
                    self._object.do_handshake()
                    self.ready = True
                while self._arrived.pending:  # A read that finds nothing costs more than one of a small message.
                    read = int(self._object.read(_RECORD, self._content[size:]))  # How many, where there is a buffer.
                    if not read:
                        raise WireError(f"{self._who} has ended TLS, and sent more.")
                    size += read
        except ssl.SSLWantReadError:  # The rest of the last record has yet to come.
            pass
        except ssl.SSLCertVerificationError as error:
            raise WireError(
                f"{self._who} has another certificate than this run's ({error.verify_message}): it is not the "
                "coordinator of this run, and may be someone who reads along."
            ) from error
        except ssl.SSLError as error:
            raise WireError(
                f"{self._who} refused this run's certificate, speaks no TLS, or its bytes were changed on their way "
                f"({error.reason or error})."
            ) from error
        return self._content[:size]
