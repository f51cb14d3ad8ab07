"""An HTTP server of keys and values, through which Horovod's Gloo finds the other ranks (rank)."""

from __future__ import annotations

import re
import socket
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

MOST_BYTES = 1 << 20
"""Of a value: the addresses of one rank for all others, of at most 130 bytes each."""
_PATH, _SIZE = re.compile(r"/[^/]+/[^/]+"), re.compile("[0-9]{1,7}")


class HTTPStore(socketserver.ThreadingTCPServer):
    """Serves `PUT`, `GET` and `DELETE` of `/scope/key` at a free port of `address`, until it is closed.

    It answers as Horovod's own does: 200, 404 for a key that is not there, 400 for another path or too large a value.
    Horovod takes 404 for "not yet", and asks again 10 ms later, so a key is waited for first: a rank that waits for one
    that never comes would use as much CPU as one that works.
    """

    patience_seconds = 5.0

    daemon_threads = True
    request_queue_size = 1024  # All ranks come at once, and give up after three attempts.

    def __init__(self, address: str) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closing = False
        super().__init__((address, 0), _Handler)
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self._serve, name="tritium-store", daemon=True)
        self._thread.start()

    def get(self, path: str) -> bytes | None:
        """Return the value at the path, as soon as it is there; None after `patience_seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: path in self._values or self._closing, self.patience_seconds)
            return self._values.get(path)

    def put(self, path: str, value: bytes | None) -> None:
        """Set the value at the path; None removes it."""
        with self._changed:
            if value is None:
                self._values.pop(path, None)
            else:
                self._values[path] = value
            self._changed.notify_all()

    def close(self) -> None:
        """End the server."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        socket.create_connection(self.server_address[:2]).close()  # type: ignore[arg-type]  # Typeshed has a union.
        self._thread.join()
        self.server_close()

    def _serve(self) -> None:
        while not self._closing:  # Unlike serve_forever, which looks every half second.
            self.handle_request()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse the connection that only wakes the thread."""
        return not self._closing

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless a client is gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10
    """Seconds for a request to arrive."""
    server: HTTPStore

    def do_GET(self) -> None:
        value = self.server.get(self.path) if _PATH.fullmatch(self.path) else None
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        size = self.headers.get("Content-Length", "")
        if not _SIZE.fullmatch(size) or int(size) > MOST_BYTES or not _PATH.fullmatch(self.path):
            self._answer(400)
            return
        value = self.rfile.read(int(size))
        if len(value) == int(size):  # Else the client is gone.
            self.server.put(self.path, value)
        self._answer(200)

    def do_DELETE(self) -> None:
        self.server.put(self.path, None)
        self._answer(200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response_only(status if _PATH.fullmatch(self.path) else 400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: these are not the user's words."""
