"""What Horovod is told of a rank, and the store in which its ranks find each other; neither needs Horovod."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from clusters import listening
from tritium import frameworks
from tritium.errors import BadSetting
from tritium.frameworks.horovod import Horovod, variables
from tritium.frameworks.http_store import MOST_BYTES, HTTPStore


def places(sizes: Sequence[int]) -> list[Any]:
    """Return the ranks of a gang on `host0`, `host1` …, with `sizes[i]` ranks on host i."""
    peers = [SimpleNamespace(host=f"host{n}", local_rank=rank) for n, size in enumerate(sizes) for rank in range(size)]
    local = [size for size in sizes for _ in range(size)]
    return [
        SimpleNamespace(rank=rank, size=len(peers), local_size=local[rank], peers=peers, **vars(peer))
        for rank, peer in enumerate(peers)
    ]


@pytest.fixture
def store() -> Iterator[HTTPStore]:
    store = HTTPStore("127.0.0.1")
    yield store
    store.close()


def ask(store: HTTPStore, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=20)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_cross_ranks_are_those_of_the_hosts_that_have_the_local_rank() -> None:
    found = [variables(place) for place in places([2, 1, 3])]
    numbers = [
        [int(each[f"HOROVOD_{name}"]) for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
        for each in found
    ]
    assert numbers == [
        [0, 0, 2, 0, 3],
        [1, 1, 2, 0, 2],
        [2, 0, 1, 1, 3],
        [3, 0, 3, 2, 3],
        [4, 1, 3, 1, 2],
        [5, 2, 3, 0, 1],
    ]
    assert {each["HOROVOD_SIZE"] for each in found} == {"6"}
    assert [each["HOROVOD_HOSTNAME"] for each in found] == ["host0", "host0", "host1", "host2", "host2", "host2"]
    assert {each["HOROVOD_CONTROLLER"] for each in found} == {"gloo"}


def test_a_value_is_put_read_and_removed(store: HTTPStore) -> None:
    value = bytes(range(256))
    assert ask(store, "PUT", "/global/0", value) == (200, b"")
    assert ask(store, "PUT", "/local_host0/0", b"") == (200, b"")
    assert ask(store, "GET", "/global/0") == (200, value)
    assert ask(store, "GET", "/local_host0/0") == (200, b"")
    assert ask(store, "PUT", "/global/0", b"another") == (200, b"")
    assert ask(store, "GET", "/global/0") == (200, b"another")
    store.patience_seconds = 0.1
    for _ in range(2):  # one that is not there can be removed, too
        assert ask(store, "DELETE", "/global/0") == (200, b"")
    assert ask(store, "GET", "/global/0") == (404, b"")
    assert ask(store, "GET", "/local_host0/0") == (200, b"")


def test_a_key_that_is_not_there_is_waited_for(store: HTTPStore) -> None:
    store.patience_seconds = 0.3
    began = time.monotonic()
    assert ask(store, "GET", "/global/1") == (404, b"")
    assert time.monotonic() - began >= 0.3
    store.patience_seconds = 60.0
    putting = threading.Timer(0.2, ask, (store, "PUT", "/global/1", b"here"))
    putting.start()
    assert ask(store, "GET", "/global/1") == (200, b"here")
    putting.join()


@pytest.mark.parametrize("path", ["/", "/global", "/global/", "/global/0/1", "global/0"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_path_that_is_not_that_of_a_key(store: HTTPStore, method: str, path: str) -> None:
    began = time.monotonic()
    assert ask(store, method, path, b"x" if method == "PUT" else None) == (400, b"")
    assert time.monotonic() - began < store.patience_seconds  # nothing is waited for


@pytest.mark.parametrize("size", [str(MOST_BYTES + 1), "9" * 5000, "-1", "many", ""])
def test_a_value_of_a_size_that_is_not_taken(store: HTTPStore, size: str) -> None:
    assert ask(store, "PUT", "/global/0", **{"Content-Length": size})[0] == 400
    store.patience_seconds = 0.1
    assert ask(store, "GET", "/global/0") == (404, b"")


def test_a_client_that_goes_in_the_middle_leaves_nothing(store: HTTPStore, capfd: pytest.CaptureFixture[str]) -> None:
    for request in (b"PUT /global/0 HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf", b"GET", b"nonsense\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", store.port)) as client:
            client.sendall(request)
    store.patience_seconds = 0.1
    assert ask(store, "GET", "/global/0") == (404, b"")
    assert capfd.readouterr() == ("", "")


def test_the_end_is_at_once_and_frees_the_port() -> None:
    store = HTTPStore("127.0.0.1")
    store.patience_seconds = 60.0
    with socket.create_connection(("127.0.0.1", store.port)) as client:
        client.sendall(b"GET /global/0 HTTP/1.1\r\n\r\n")
        began = time.monotonic()
        store.close()
        assert time.monotonic() - began < 30
    assert store.port not in listening()


def test_an_address_that_horovod_does_not_take_is_refused_before_anything_is_shared() -> None:
    (place, _) = places([2])
    for peer in place.peers:
        peer.address = "fd00::1"
    with patch.dict(os.environ), pytest.raises(BadSetting, match="by IPv4 only, and rank 0 has the address fd00::1"):
        Horovod().run(place, lambda: None)


def test_a_function_that_imports_horovod_is_told_of_the_framework() -> None:
    def imports(package: str) -> bool:
        return package in ("horovod", "torch", "tensorflow")

    for framework in (None, frameworks.find("torch"), frameworks.find("tensorflow")):
        assert "imports horovod" in str(frameworks.unnamed(framework, imports))
        assert 'framework="horovod"' in str(frameworks.unnamed(framework, imports)).replace("'", '"')
    assert frameworks.unnamed(Horovod(), imports) is None


@pytest.mark.parametrize(
    ("text", "secondary"),
    [
        ("HorovodInternalError: Horovod has been shut down. This was caused by an exception on one of", True),
        ("UnknownError: Horovod has been shut down. This was caused by an exception on one of", True),
        ("HorovodInternalError: [/x/gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:411", True),
        ("HorovodInternalError: ncclAllReduce failed: unhandled system error", True),
        ("HorovodInternalError: Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2]", False),
        ("ValueError: Horovod has not been initialized; use hvd.init().", False),
    ],
)
def test_an_error_that_only_says_that_another_rank_has_ended(text: str, secondary: bool) -> None:
    assert any(pattern.search(text) for pattern in frameworks.patterns("secondary")) is secondary
