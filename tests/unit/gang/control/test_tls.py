"""Connections under TLS: what somebody on the network can read, and whom the ends take for each other."""

from __future__ import annotations

import json
import random
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from clusters import wait
from control_server import SECONDS, SECRET, Serving
from proxy import Proxy, before_coordinators
from tritium.errors import BadSetting, WireError
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.driver import attempt
from tritium.gang.driver.certificate import certificate_of, new_certificate
from tritium.gang.supervisor import relay
from tritium.tls import Tls
from tritium.wire import Channel, Message

CERTIFICATE, ANOTHER = new_certificate(), new_certificate()
PLANTED = b"the patient's name"


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving(CERTIFICATE) as server:
        yield server


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proxy]]:
    """Put every coordinator that a launch makes behind a proxy, which is in the list yielded."""
    with before_coordinators(monkeypatch) as proxies:
        yield proxies


def tells_all() -> list[bytes]:
    world = tr.world()
    print(PLANTED.decode())
    world.note(PLANTED.decode())
    if world.rank == 0:
        world.store("file", [PLANTED])
    return world.gather(PLANTED + bytes([world.rank]))


@pytest.mark.processes
@pytest.mark.parametrize("tls", [True, False])
def test_on_the_network_nothing_of_a_run_can_be_read(tls: bool, proxies: list[Proxy], tmp_path: Path) -> None:
    results = tr.launch(tells_all, ranks=2, on="driver", tls=tls, run_dir=str(tmp_path), progress=False, output="none")
    assert results == [[PLANTED + b"\0", PLANTED + b"\1"]] * 2
    assert (tmp_path / "file").read_bytes() == PLANTED
    (proxy,) = proxies
    for direction in (proxy.sent, proxy.answered):
        assert len(direction) == 2
        for crossed in direction:
            assert (PLANTED in crossed) is not tls
            assert (b'"kind"' in crossed) is not tls


@pytest.mark.processes
def test_another_certificate_is_refused_by_name_while_a_gang_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impostor(Coordinator):
        """Knows even the secret."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "certificate": ANOTHER})
            self.certificate = CERTIFICATE  # This one reaches the supervisors.

    monkeypatch.setattr(attempt, "Coordinator", Impostor)
    monkeypatch.setattr(relay, "CONNECT_SECONDS", 3.0)
    with pytest.raises(WireError, match=r"127\.0\.0\.1:\d+, tried for 3 s: What answers at .* has another certif"):
        tr.launch(
            tells_all, ranks=2, on="driver", tls=True, retries=0, run_dir=str(tmp_path), progress=False, output="none"
        )
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    refused = [event["reason"] for event in events if event["kind"] == "refused"]
    assert refused
    assert all(reason.startswith("A client refused this run's certificate") for reason in refused)


def test_a_man_in_the_middle_is_not_spoken_to(serving: Serving) -> None:
    """He decrypts with a certificate of his own, and passes everything on to the coordinator."""
    read: list[bytes] = []

    def relayed(listening: socket.socket) -> None:
        with listening.accept()[0] as client, socket.create_connection(serving.server.address) as coordinator:
            try:
                inside = ANOTHER.for_server().wrap_socket(client, server_side=True)
            except ssl.SSLError as error:
                read.append(str(error).encode())
                return
            with inside, CERTIFICATE.for_client().wrap_socket(coordinator) as outside:
                inside.sendall(outside.recv(100))
                read.append(inside.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=relayed, args=(listening,))
        thread.start()
        with pytest.raises(WireError, match="another certificate than this run's"):
            Channel.connect(listening.getsockname(), SECRET, SECONDS, CERTIFICATE)
        thread.join()
    assert len(read) == 1
    assert b"unknown ca" in read[0].lower()


def test_ends_of_which_only_one_has_a_certificate(serving: Serving) -> None:
    with pytest.raises(WireError, match=r"broke off: timed out"):
        Channel.connect(serving.server.address, SECRET, 0.2)
    with Serving() as plain, pytest.raises(WireError, match=r"What answers at .* speaks no TLS"):
        Channel.connect(plain.server.address, SECRET, SECONDS, CERTIFICATE)


def test_an_older_tls_is_refused(serving: Serving) -> None:
    context = CERTIFICATE.for_client()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(serving.server.address) as sock, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(sock).close()
    wait(lambda: bool(serving.broken), "it is refused")
    assert "UNSUPPORTED_PROTOCOL" in serving.broken[0]


def test_a_client_that_ends_tls_and_goes_on_keeps_nobody_waiting(serving: Serving) -> None:
    with socket.create_connection(serving.server.address) as sock:
        tls = CERTIFICATE.connect(sock, "the server")
        with pytest.raises(ssl.SSLWantReadError):
            tls._object.unwrap()
        sock.sendall(tls.sealed() + b"more")
    wait(lambda: bool(serving.broken), "it is refused")
    assert "has ended TLS" in serving.broken[0]
    with serving.line() as ours:
        ours.send("echo", number=0)
        assert ours.receive() == Message("echoed", {"number": 0})


def test_the_secret_is_still_needed(serving: Serving) -> None:
    with pytest.raises(WireError, match=r"closed during the handshake|broke off"):
        Channel.connect(serving.server.address, b"a guess", SECONDS, CERTIFICATE)
    assert serving.broken == ["A client did not prove that it knows this run's secret."]


def test_what_a_client_says_in_the_clear_proves_nothing(serving: Serving) -> None:
    """Somebody passes the proof of a client without TLS on, as his own."""

    def passed_on(listening: socket.socket) -> None:
        with (
            listening.accept()[0] as client,
            socket.create_connection(serving.server.address) as coordinator,
            CERTIFICATE.for_client().wrap_socket(coordinator) as own,
        ):
            client.sendall(own.recv(100))
            own.sendall(client.recv(100))
            assert own.recv(100) == b""

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        somebody = pool.submit(passed_on, listening)
        with pytest.raises(WireError, match="closed during the handshake"):
            Channel.connect(listening.getsockname(), SECRET, SECONDS)
        somebody.result()
    assert serving.broken == ["A client did not prove that it knows this run's secret."]


def test_bytes_that_somebody_adds_end_the_connection_and_not_the_session(serving: Serving) -> None:
    proxy = Proxy(serving.server.address)
    try:
        with serving.line(proxy.address) as ours:
            for number in range(3):
                ours.send("echo", number=number)
                assert ours.receive() == Message("echoed", {"number": number})
                proxy.inject(b"\x17\x03\x03\x00\x30" + bytes(48))
                wait(lambda number=number: serving.connections == number + 2, "it is connected again")
    finally:
        proxy.close()
    assert len(serving.broken) == 3
    assert "changed on their way" in serving.broken[0]


def test_a_handshake_in_single_bytes(serving: Serving) -> None:
    """And one that stops does not keep others waiting."""
    with socket.create_connection(serving.server.address) as stopped, serving.line() as ours:
        stopped.send(b"\x16\x03")
        ours.send("echo", number=0)
        assert ours.receive() == Message("echoed", {"number": 0})
    tls, received = Tls(CERTIFICATE.for_client(), "the server", bytearray(1)), b""
    with socket.create_connection(serving.server.address) as sock:
        sock.settimeout(SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls.opened(b"")
        while not received:
            for byte in tls.sealed():
                sock.send(bytes([byte]))
            received = bytes(tls.opened(sock.recv(1)))
    assert received.startswith(b"TRITIUM")


def test_a_large_value_that_all_get(serving: Serving) -> None:
    blob = random.Random(1).randbytes(100 << 20)
    with serving.line() as first, serving.line() as second:
        first.send("gather", blob)
        for line in (first, second):
            message = line.receive()
            assert message is not None, line.reason
            assert message.blob == blob


def test_both_ends_send_at_once_and_from_several_threads() -> None:
    ours, theirs = socket.socketpair()
    server = CERTIFICATE.acceptor()()
    answers = threading.Thread(target=shake_hands, args=(server, theirs))
    answers.start()
    client = CERTIFICATE.connect(ours, "the server")
    answers.join()
    ends = Channel(ours, tls=client), Channel(theirs, side=b"s", tls=server)
    received: list[list[Message]] = [[], []]

    def send(end: Channel, sender: int) -> None:
        for number in range(40):
            end.send("part", bytes([sender]) * 100_000 * (number % 4), sender=sender, number=number)

    def receive(end: Channel, messages: list[Message]) -> None:
        while len(messages) < 80 and (message := end.receive()) is not None:
            messages.append(message)

    threads = [threading.Thread(target=send, args=(end, sender)) for end in ends for sender in range(2)]
    threads += [threading.Thread(target=receive, args=pair) for pair in zip(ends, received, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for messages in received:
        for sender in range(2):
            numbers = [message["number"] for message in messages if message["sender"] == sender]
            assert numbers == list(range(40))
        assert all(m.blob == bytes([m["sender"]]) * 100_000 * (m["number"] % 4) for m in messages)
    for end in ends:
        end.close()


def shake_hands(server: Tls, sock: socket.socket) -> None:
    while not server.ready:
        server.opened(sock.recv(1 << 14))
        sock.sendall(server.sealed())


class Session:
    """The part of a SparkSession that is used."""

    def __init__(self, **conf: str) -> None:
        self._values = {name.replace("_", "."): value for name, value in conf.items()}
        self.conf = self

    def get(self, name: str, default: str) -> str:
        return self._values.get(name, default)


class TestDefault:
    @pytest.mark.parametrize("name", ["spark_ssl_rpc_enabled", "spark_network_crypto_enabled"])
    def test_is_what_spark_does_for_its_own_connections(self, name: str) -> None:
        notes: list[str] = []
        assert certificate_of(None, notes.append, Session(**{name: "true"})) is not None
        assert certificate_of(None, notes.append, Session(**{name: "false"})) is None
        assert certificate_of(False, notes.append, Session(**{name: "true"})) is None
        assert certificate_of(None, notes.append) is None
        assert certificate_of(True, notes.append) is not None
        assert not notes

    def test_needs_a_package_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        notes: list[str] = []
        monkeypatch.setitem(sys.modules, "cryptography", None)
        assert certificate_of(None, notes.append, Session(spark_ssl_rpc_enabled="true")) is None
        assert len(notes) == 1
        assert "spark.ssl.rpc.enabled=true" in notes[0]
        assert 'pip install "tritium[tls]"' in notes[0]
        with pytest.raises(BadSetting, match=r"tls=True: the driver has no cryptography.*tritium\[tls\]"):
            tr.launch(tells_all, on="driver", tls=True, progress=False)

    def test_a_certificate_is_new_for_each_run_and_its_key_is_not_shown(self) -> None:
        assert CERTIFICATE.public != ANOTHER.public
        assert CERTIFICATE.private != ANOTHER.private
        assert "PRIVATE" in CERTIFICATE.private
        assert "PRIVATE" not in repr(CERTIFICATE)
