"""The leak check reports each kind of leak, and nothing where there is none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

import pytest

import leaks


def _process() -> Callable[[], object]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return lambda: (child.communicate(), None)


def _thread() -> Callable[[], object]:
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="left over")
    thread.start()
    return lambda: (event.set(), thread.join())


def _listening() -> Callable[[], object]:
    server = socket.create_server(("127.0.0.1", 0))
    return server.close


def _bound() -> Callable[[], object]:
    placeholder = socket.socket()
    placeholder.bind(("127.0.0.1", 0))
    return placeholder.close


def _file() -> Callable[[], object]:
    number, name = tempfile.mkstemp()
    os.close(number)
    return lambda: os.unlink(name)


def _spool() -> Callable[[], object]:
    number, name = tempfile.mkstemp()
    os.unlink(name)
    return lambda: os.close(number)


def _variable() -> Callable[[], object]:
    os.environ["MASTER_PORT"] = "1"
    return lambda: os.environ.pop("MASTER_PORT")


def _path() -> Callable[[], object]:
    sys.path.insert(0, "/nowhere")
    return lambda: sys.path.remove("/nowhere")


def _handler() -> Callable[[], object]:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    return lambda: signal.signal(signal.SIGINT, before)


def test_a_connected_socket_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = leaks.Trace.now(set())
        with socket.create_connection(server.getsockname()):
            assert before.left(set()) == []


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (_process, "process "),
        (_thread, "thread left over"),
        (_listening, "socket listening on ('127.0.0.1'"),
        (_bound, "socket bound to ('127.0.0.1'"),
        (_file, "file "),
        (_spool, "deleted file held open or mapped"),
        (_variable, "environment variable MASTER_PORT: None became '1'"),
        (_path, "sys.path: {'/nowhere'}"),
        (_handler, "handler of SIGINT"),
    ],
)
def test_what_is_left_behind_is_named(
    leave: Callable[[], Callable[[], object]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "SECONDS", 0.2)
    before = leaks.Trace.now(set())
    undo = leave()
    found = before.left(set())
    undo()
    assert len(found) == 1
    assert found[0].startswith(words)
    assert before.left(set()) == []
