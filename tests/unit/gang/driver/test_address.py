"""The address on which the coordinator listens, and the errors of one that can't work."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

import tritium.spark.session
from tritium.errors import BadSetting
from tritium.events import Event
from tritium.gang.control.address import HOST, PORT, listener, unreachable, unreachable_in
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.driver.address import BIND, driver_place
from tritium.gang.rank.network import interfaces
from tritium.spark.cluster.connect import Connect, route_to
from tritium.spark.cluster.local import Local
from tritium.spark.cluster.standalone import Standalone
from tritium.wire import Channel, address_text

NOBODYS = "203.0.113.7"  # reserved for documentation


class Session:
    """The part of a SparkSession that is used."""

    def __init__(self, *executors: str, kind: str = "standalone", **conf: str) -> None:
        self.values = {name.replace("_", "."): value for name, value in conf.items()}
        self.conf = self
        self.kind = {"standalone": Standalone, "local": Local, "connect": Connect}[kind]
        self.executors = list(executors)

    def get(self, name: str, default: str) -> str:
        return self.values.get(name, default)

    def with_(self, **conf: str) -> Session:
        names = {"host": HOST, "bind": BIND, "port": PORT}
        self.values |= {names[name]: value for name, value in conf.items()}
        return self


def place(session: Session) -> Any:
    cluster: Any = session.kind(tritium.spark.session.Session(session))
    cluster.executor_hosts = lambda: session.executors
    return driver_place(session, cluster)


class Quiet:
    def event(self, event: Event) -> None: ...
    def output(self, rank: int, text: str) -> None: ...
    def store(self, name: str, chunk: bytes, last: bool) -> None: ...


class TestDefaults:
    def test_are_sparks_own_settings(self) -> None:
        found = place(Session(spark_driver_host="localhost", spark_driver_bindAddress="127.0.0.1"))
        assert (found.bind, found.advertised, found.ports) == ("127.0.0.1", "localhost", (0,))

    def test_over_connect_is_that_of_the_route_to_the_server(self) -> None:
        assert route_to("sc://127.0.0.1:15002/;user_id=1") == "127.0.0.1"
        with pytest.raises(BadSetting, match="no-such-name"):
            route_to("no-such-name.invalid")

    def test_without_a_bind_address_the_hosts(self) -> None:
        assert place(Session(spark_driver_host="127.0.0.1")).bind == "127.0.0.1"

    def test_of_a_local_master_are_this_machine_alone(self) -> None:
        found = place(Session(kind="local", spark_driver_host=NOBODYS))
        assert (found.bind, found.advertised) == ("127.0.0.1", "127.0.0.1")

    def test_a_name_that_nat_leads_here_is_bound_on_the_bind_address(self) -> None:
        found = place(Session("10.9.8.7", spark_driver_host="nat.example", spark_driver_bindAddress="0.0.0.0"))
        with found.listen() as bound:
            gang = Coordinator(1, launch="L", observer=Quiet(), listener=bound, advertised=found.advertised)
            assert gang.address == ("nat.example", bound.getsockname()[1])
            gang.close()

    def test_brackets_as_spark_writes_them(self) -> None:
        assert place(Session(spark_driver_host="[::1]")).bind == "::1"


class TestOurSettings:
    @pytest.mark.parametrize("kind", ["standalone", "local", "connect"])
    def test_go_before_sparks(self, kind: str) -> None:
        session = Session(kind=kind, spark_driver_host=NOBODYS, spark_driver_bindAddress=NOBODYS)
        found = place(session.with_(host="::1", bind="::"))
        assert (found.bind, found.advertised) == ("::", "::1")

    def test_a_port_that_is_taken_is_followed_by_the_next(self) -> None:
        with listener("127.0.0.1") as taken:
            port = taken.getsockname()[1]
            with place(Session(kind="local").with_(port=str(port))).listen() as bound:
                assert port < bound.getsockname()[1] <= port + 16
            none_left = Session(kind="local", spark_port_maxRetries="0").with_(port=str(port))
            with pytest.raises(BadSetting, match=rf"{PORT}={port}: the ports {port} to {port} of 127.0.0.1 are taken"):
                place(none_left).listen()

    @pytest.mark.parametrize("port", ["-1", "65536", "many"])
    def test_a_port_that_is_none(self, port: str) -> None:
        with pytest.raises(BadSetting, match=rf"{PORT}='{port}' must be a port"):
            place(Session(kind="local").with_(port=port))


class TestWhatCantWork:
    def test_an_address_of_another_machine(self) -> None:
        with pytest.raises(BadSetting, match=rf"can't listen on '{NOBODYS}'.*spark\.driver\.bindAddress.*0\.0\.0\.0"):
            place(Session(spark_driver_host=NOBODYS)).listen()

    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(BadSetting, match=r"'no-such-name\.invalid' is no address"):
            place(Session(spark_driver_host="no-such-name.invalid")).listen()

    def test_a_loopback_address_while_executors_are_elsewhere(self) -> None:
        with pytest.raises(BadSetting, match=rf"executor on {NOBODYS} can't reach .*='127\.0\.1\.1'.*bindAddress=0"):
            place(Session("127.0.0.1", NOBODYS, spark_driver_host="127.0.1.1"))
        here = ["127.0.0.1", socket.gethostname()]
        assert place(Session(*here, spark_driver_host="127.0.1.1")).bind == "127.0.1.1"
        any_address = {"spark_driver_host": "localhost", "spark_driver_bindAddress": "0.0.0.0"}
        assert place(Session(NOBODYS, **any_address)).advertised == "localhost"  # executors resolve it themselves

    def test_what_an_executor_says_that_reaches_no_one_is_the_error(self) -> None:
        said = unreachable("b", (NOBODYS, 4000), 10.0, OSError("timed out"))
        error = unreachable_in(f"tritium.errors.WireError: {said}")
        assert error is not None
        assert f"The executor on b can't reach the coordinator at {NOBODYS}:4000, tried for 10 s: timed out" in str(
            error
        )
        assert PORT in str(error)
        assert unreachable_in("ExecutorLostFailure") is None


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="needs IPv6")
def test_ipv6_from_the_listener_to_the_interface() -> None:
    gang = Coordinator(1, launch="L", observer=Quiet(), host="::1").start()
    try:
        assert gang.address[0] == "::1"
        channel = Channel.connect(gang.address, gang.secret, 5.0)
        assert channel.addresses == ("::1", "::1")
        channel.close()
    finally:
        gang.close()
    assert {interfaces()[address] for address in ("::1", "127.0.0.1")} == {"lo"}
    assert address_text(("::1", 4000)) == "[::1]:4000"
