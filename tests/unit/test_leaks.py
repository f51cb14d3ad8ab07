"""The leak check reports each kind of leak, and nothing where there is none."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace

import psutil
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
    found = [before.left(set()), before.left_and_now(set(), whole=False)[0]]
    undo()
    assert [len(each) for each in found] == [1, 1]
    assert all(each[0].startswith(words) for each in found)
    assert before.left(set()) == []


def test_a_process_without_a_command_line_yet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "SECONDS", 0.0)
    before = leaks.Trace.now(set())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    cmdline = psutil.Process.cmdline
    # What Linux shows while a process begins a program.
    monkeypatch.setattr(psutil.Process, "cmdline", lambda each: [] if each.pid == child.pid else cmdline(each))
    found = before.left(set())
    child.communicate()
    assert [text.partition(": ")[0] for text in found] == [f"process {child.pid}"]


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")
def test_a_mapping_is_named_at_once_and_that_of_a_library_at_the_end_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaks, "SECONDS", 0.0)
    number, name = tempfile.mkstemp()
    os.unlink(name)
    os.truncate(number, 4096)
    before = leaks.Trace.now(set())  # with the file open
    with mmap.mmap(number, 4096):
        assert f"deleted file held open or mapped: {name} (deleted)" in before.left_and_now(set(), whole=False)[0]
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 4, ctypes.c_long]
    place = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, number, 0)
    os.close(number)
    before = replace(before, mmaps=leaks._mmaps)
    assert before.left_and_now(set(), whole=False)[0] == []
    assert before.left(set()) == [f"deleted file held open or mapped: {name} (deleted)"]
    libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(4096))
    assert before.left(set()) == []
