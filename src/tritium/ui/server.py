"""Serve the page, from a shell or from a driver whose runs it shows (driver)."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritium.errors import BadSetting, WrongVersion

if TYPE_CHECKING:
    import uvicorn

    from tritium.ui.runs import Runs

GRACE_SECONDS = 3
"""The limit for answers that are being sent when the server ends."""


@dataclass(frozen=True)
class Page:
    """A server that listens, and has not begun to answer.

    url : the address with the token.
    """

    url: str
    runs: Runs
    server: uvicorn.Server
    socket: socket.socket

    def serve(self) -> None:
        """Answer until the server is told to end, in a main thread by Ctrl-C or SIGTERM."""
        with self.socket:
            self.server.run(sockets=[self.socket])


def page(urls: Iterable[str], host: str = "127.0.0.1", port: int = 0, allow: tuple[str, ...] = ()) -> Page:
    """Return the page over run directories, or folders of them, that listens on `host` and `port` (0: a free one).

    allow : further names by which browsers may call it.
    Raises WrongVersion where starlette or uvicorn are missing, and BadSetting where it can't listen.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise WrongVersion(f"The page needs {error.name}: pip install 'tritium[ui]'.", library=error.name) from error
    from tritium.ui.app import application
    from tritium.ui.runs import Runs

    runs, token = Runs(urls), secrets.token_urlsafe(24)
    config = uvicorn.Config(
        application(runs, token, host, allow, lambda: server.should_exit),
        access_log=False,  # It would print the token.
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server, listening = uvicorn.Server(config), _listen(host, port)
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listening.getsockname()[1]}/?token={token}"
    return Page(url, runs, server, listening)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise BadSetting(
            f"The page can't listen on {host}, port {port}: {error}. Choose another with --host and --port; 0 is a "
            "free one.",
            setting="port",
        ) from error
