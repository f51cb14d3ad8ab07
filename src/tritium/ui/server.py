"""Serve the page, from a shell or from a driver whose runs it shows (driver)."""

from __future__ import annotations

import atexit
import importlib.util
import os
import secrets
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritium.errors import BadSetting, WrongVersion

if TYPE_CHECKING:
    import uvicorn

    from tritium.ui.runs import Runs
    from tritium.ui.told import Teller

TOKEN = "TRITIUM_UI_TOKEN"
"""The environment variable with the token; without it, each server makes one."""
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
        """Answer until `server.should_exit` is set; in a main thread, Ctrl-C and SIGTERM set it."""
        with self.socket:
            self.server.run(sockets=[self.socket])


def check_installed() -> None:
    """Raise WrongVersion where what serves the page is missing."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise WrongVersion(f"The page needs {name}: pip install 'tritium[ui]'.", library=name)


def page(
    urls: Iterable[str], told: Teller, host: str = "127.0.0.1", port: int = 0, allow: tuple[str, ...] = ()
) -> Page:
    """Return the page over run directories, or folders of them, that listens on `host` and `port` (0: a free one).

    told  : says what failed.
    allow : further names by which browsers may call it.
    Raises WrongVersion as `check_installed` does, and BadSetting where it can't listen.
    """
    check_installed()
    import uvicorn

    from tritium.ui.app import application
    from tritium.ui.runs import Runs

    runs, token = Runs(urls, told), os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    config = uvicorn.Config(
        application(runs, token, host, allow, lambda: server.should_exit),
        access_log=False,  # It would print the token.
        log_config=None,  # Its own closes all handlers of this process, and enables the loggers that are disabled.
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server, listening = uvicorn.Server(config), _listen(host, port)
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listening.getsockname()[1]}/?token={token}"
    return Page(url, runs, server, listening)


# ---- Served by a driver, for its runs

_serving: list[tuple[Page, threading.Thread]] = []
_lock = threading.Lock()


def show(run_dir: str, here: str, told: Teller) -> str:
    """Add a run of this process to its page, and return the run's address. The first call starts the server.

    here : the local directory in which the run is written until it ends.
    The page is served until `stop`, or the end of the interpreter.
    """
    with _lock:
        if not _serving:
            served = page((), told)
            thread = threading.Thread(target=served.serve, name="tritium-ui", daemon=True)
            thread.start()
            _serving.append((served, thread))
            atexit.register(stop)
        served = _serving[0][0]
        return f"{served.url}#{served.runs.add(run_dir, here)}"


def stop() -> None:
    """End the server of this process, if there is one."""
    with _lock:
        while _serving:
            served, thread = _serving.pop()
            served.server.should_exit = True
            thread.join()
            atexit.unregister(stop)


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
