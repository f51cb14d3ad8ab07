"""The control server over real sockets: authentication, ranks, and what every supervisor is told."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clusters import listening, wait
from tritium.accelerators import NONE, Accelerators
from tritium.data.steps import Feed, Watermark
from tritium.errors import BadRow, BadSetting, Stalled, WireError
from tritium.events import Event, Logged
from tritium.gang.control import server as server_module
from tritium.gang.control.client import Client
from tritium.gang.control.server import MAX_UNAUTHENTICATED
from tritium.gang.coordinator import all_gather, first_failure, stall_alarm
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.coordinator.members import Member
from tritium.gang.coordinator.ranks import assign_ranks, assignments, device_problem
from tritium.gang.coordinator.rows import agree
from tritium.gang.driver.outcome import missing_note
from tritium.gang.failure import Failure
from tritium.gang.stall_limit import StallLimit
from tritium.observe.stored import Piece
from tritium.wire import MAGIC, NONCE, Challenge, Channel, Message

SECONDS = 10.0


class Observer:
    """An observer that keeps the coordinator's events."""

    def __init__(self) -> None:
        self.heard = threading.Condition()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.text: dict[int, str] = {}
        self.stored: list[Piece] = []
        self.traced: list[tuple[int, bytes]] = []

    def event(self, event: Event) -> None:
        with self.heard:
            self.events.append((event.kind, event.fields()))
            self.heard.notify_all()

    def await_event(self, kind: str) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: self.of(kind), SECONDS), f"no event {kind!r} came"

    def output(self, rank: int, text: str) -> None:
        self.text[rank] = self.text.get(rank, "") + text

    def spans(self, rank: int, line: bytes) -> None:
        self.traced.append((rank, line))

    def store(self, piece: Piece) -> None:
        self.stored.append(piece)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]


class Gang:
    """A coordinator, and supervisors that the test simulates."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.observer = settings.pop("observer", Observer())
        self.coordinator = Coordinator(size, launch="L1", observer=self.observer, **settings).start()
        self.supervisors: list[Client] = []

    def connect(self) -> Client:
        channel = Client(self.coordinator.address, self.coordinator.secret, f"task {len(self.supervisors)}", SECONDS)
        self.supervisors.append(channel)
        return channel

    def hello(self, partition: int, **fields: Any) -> Client:
        channel = self.connect()
        host = fields.pop("host", "a")
        said = {"launch": "L1", "attempt": 0, "address": f"10.0.0.{ord(host[0])}", "port": 4000 + partition, "pid": 7}
        channel.send("hello", partition=partition, host=host, **{**said, "gpus": [], **fields})
        return channel

    def form(self) -> list[Client]:
        """Let all supervisors report. Return them in the order of their ranks (one host: of their partitions)."""
        supervisors = [self.hello(partition) for partition in range(self.coordinator.size)]
        for channel in supervisors:
            channel.send("ready", pid=100)
        for channel in supervisors:
            heard(channel, "assign")
        return supervisors

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        with self.coordinator.changed:
            while not condition():
                assert time.monotonic() < deadline, what
                self.coordinator.changed.wait(0.05)  # not of every change that a test looks for it is told

    def close(self) -> None:
        self.coordinator.close()
        for channel in self.supervisors:
            channel.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Gang]]:
    gangs: list[Gang] = []

    def start(size: int = 2, **settings: Any) -> Gang:
        gangs.append(Gang(size, **settings))
        return gangs[-1]

    yield start
    for gang in gangs:
        gang.close()


Start = Callable[..., Gang]


def test_spans_get_the_clock_that_the_supervisor_has_measured(start: Start) -> None:
    gang = start()
    _, second = gang.form()
    before = time.time()
    second.send("clock", sent=12.5)
    answer = heard(second, "clock")
    assert answer["sent"] == 12.5
    assert before <= answer["at"] <= time.time()
    second.send("spans", b"12345678", epoch=5.0, offset=0.25, error=0.001)
    gang.until(lambda: gang.observer.traced, "no spans came")
    ((rank, line),) = gang.observer.traced
    assert rank == 1
    assert json.loads(line) == {"epoch": 5.0, "offset": 0.25, "error": 0.001, "torch": None, "spans": "MTIzNDU2Nzg="}


def heard(channel: Client, kind: str) -> Message:
    """Return the next message, which is of this kind."""
    message = channel.receive()
    assert message is not None, f"the coordinator hung up instead of saying {kind!r}"
    assert message.kind == kind, message
    return message


def hung_up(sock: socket.socket) -> bool:
    sock.settimeout(SECONDS)
    try:
        while sock.recv(4096):
            continue
    except ConnectionError:
        return True
    return True


class TestStrangers:
    def test_garbage_is_dropped_and_the_gang_forms_all_the_same(self, start: Start) -> None:
        gang, chance = start(), random.Random(3)
        first = gang.hello(0)
        for size in (1, 64, 5000):
            with socket.create_connection(gang.coordinator.address) as stranger:
                stranger.sendall(chance.randbytes(size))
                stranger.shutdown(socket.SHUT_WR)
                assert hung_up(stranger)
        second = gang.hello(1)
        for channel in (first, second):
            channel.send("ready", pid=1)
        assert [heard(channel, "assign")["rank"] for channel in (first, second)] == [0, 1]
        assert gang.coordinator.failure is None
        assert [refused["reason"] for refused in gang.observer.of("refused")] == [
            "A client did not prove that it knows this run's secret."
        ] * 2  # one byte was no answer yet

    def test_without_the_secret_no_one_is_let_in(self, start: Start) -> None:
        gang = start()
        with pytest.raises(WireError, match=r"closed during the handshake|broke off"):
            Channel.connect(gang.coordinator.address, b"not the secret", SECONDS)
        gang.form()

    def test_a_coordinator_that_repeats_our_challenge_back_learns_nothing(self, start: Start) -> None:
        """The server's proof can't be had by asking the server itself to answer: the two directions differ."""
        gang = start()
        with socket.create_connection(gang.coordinator.address) as stranger:
            greeting = stranger.recv(len(MAGIC) + NONCE, socket.MSG_WAITALL)
            stranger.sendall(greeting[len(MAGIC) :] + bytes(Challenge.size - NONCE))
            assert hung_up(stranger)
        gang.form()

    def test_half_open_connections_change_nothing(self, start: Start) -> None:
        gang = start()
        strangers = [socket.create_connection(gang.coordinator.address) for _ in range(MAX_UNAUTHENTICATED + 40)]
        strangers[-1].sendall(b"half of an answer")
        gang.form()
        assert gang.coordinator.failure is None
        for stranger in strangers:
            stranger.close()

    def test_who_says_nothing_is_dropped_after_a_while(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.1)
        gang = start()
        with socket.create_connection(gang.coordinator.address) as stranger:
            assert hung_up(stranger)
        gang.form()

    def test_a_client_that_is_cut_off_in_the_handshake_leaves_nothing(self, start: Start) -> None:
        gang = start(1)
        for sent in (b"", b"x", bytes(Challenge.size - 1)):
            with socket.create_connection(gang.coordinator.address) as stranger:
                stranger.sendall(sent)
        gang.form()
        gang.until(lambda: len(gang.coordinator._server.connections) == 1, "only the supervisor's connection is left")

    @pytest.mark.parametrize(
        "said",
        [
            Message("ready", {"pid": 1}),
            Message("hello", {"partition": "x"}),
            Message("hello", {}),
            Message("hello", {"launch": "L1", "partition": 0, "attempt": 0, "host": "a", "gpus": 3}),
            Message("_drop", {}),
            Message("serve", {}),
        ],
    )
    def test_a_client_with_the_secret_that_talks_nonsense_is_dropped(self, start: Start, said: Message) -> None:
        gang = start()
        odd = gang.connect()
        odd.pass_on(said)
        assert odd.receive() is None
        gang.form()
        assert gang.coordinator.failure is None


class TestRefusals:
    def refused(self, gang: Gang, channel: Client) -> str:
        reason = str(heard(channel, "end")["reason"])
        assert channel.receive() is None
        assert any(reason in said["reason"] for said in gang.observer.of("refused"))
        return reason

    def test_another_launch(self, start: Start) -> None:
        gang = start()
        assert self.refused(gang, gang.hello(0, launch="L0")) == "this is launch L1, not L0"
        gang.form()

    def test_a_partition_that_has_reported_already(self, start: Start) -> None:
        gang = start()
        gang.hello(0, attempt=5)
        gang.until(lambda: 0 in gang.coordinator.members, "it is known")
        again = self.refused(gang, gang.hello(0, attempt=6))
        assert again == "partition 0 has reported already (attempt 5)"

    @pytest.mark.parametrize("partition", [2, -1])
    def test_a_partition_that_there_is_not(self, start: Start, partition: int) -> None:
        gang = start()
        assert self.refused(gang, gang.hello(partition)) == f"there is no partition {partition} among 2"
        gang.form()

    def test_a_supervisor_that_comes_after_the_end(self, start: Start) -> None:
        gang = start()
        gang.hello(0).send("failed", how="exit", rank=0, exit_code=3, host="a")
        gang.until(lambda: gang.coordinator.failure, "the failure is known")
        assert self.refused(gang, gang.hello(1)).startswith("the run has ended: rank 0 on a")


def member(partition: int, host: str, *gpus: str) -> Member:
    return Member(partition, 0, host, f"10.0.0.{ord(host)}", 4000 + partition, 7, gpus)


class TestMuster:
    def test_ranks_of_a_host_are_neighbours(self) -> None:
        gang = assign_ranks([member(k, host) for k, host in enumerate("babca")])
        assert [(m.host, m.partition, m.rank, m.local_rank) for m in gang] == [
            ("b", 0, 0, 0),
            ("b", 2, 1, 1),
            ("a", 1, 2, 0),
            ("a", 4, 3, 1),
            ("c", 3, 4, 0),
        ]

    def test_the_order_does_not_depend_on_who_came_first(self) -> None:
        members = [member(k, host) for k, host in enumerate("babca")]
        chance = random.Random(1)
        for _ in range(20):
            chance.shuffle(members)
            assert [m.partition for m in assign_ranks(members)] == [0, 2, 1, 4, 3]

    def test_within_a_host_by_gpu_address_as_a_number(self) -> None:
        gang = assign_ranks([member(0, "a", "10"), member(1, "a", "9"), member(2, "b", "1"), member(3, "b", "0")])
        assert [(m.host, m.gpus) for m in gang] == [("a", ("9",)), ("a", ("10",)), ("b", ("0",)), ("b", ("1",))]

    def test_gpu_addresses_that_are_no_numbers(self) -> None:
        gang = assign_ranks([member(0, "a", "GPU-b"), member(1, "a", "GPU-a"), member(2, "a", "3")])
        assert [m.gpus for m in gang] == [("3",), ("GPU-a",), ("GPU-b",)]

    def test_a_rank_sees_the_gpus_of_its_hosts_ranks_and_its_own_first_one(self) -> None:
        gang = assign_ranks([member(0, "a", "2", "3"), member(1, "a", "0", "1"), member(2, "b", "4", "5")])
        peers = [m.peer(NONE) for m in gang]
        assert [(p["host"], p["device"], p["local_rank"]) for p in peers] == [
            ("a", "cuda:0", 0),
            ("a", "cuda:2", 1),
            ("b", "cuda:0", 0),
        ]
        places = [place for _, place in assignments(gang, NONE)]
        assert [a["visible"] for a in places] == [["0", "1", "2", "3"], ["0", "1", "2", "3"], ["4", "5"]]
        assert [a["local_size"] for a in places] == [2, 2, 1]
        assert {a["master_port"] for a in places} == {4001}

    def test_two_executors_of_one_host_that_isolation_shows_one_gpu_each(self) -> None:
        first, second = member(0, "a", "0"), member(1, "a", "0")
        first.listed, second.listed = {"0": "GPU-a"}, {"0": "GPU-b"}
        gang = assign_ranks([first, second])
        assert [(p["device"], p["local_rank"]) for p in (m.peer(NONE) for m in gang)] == [("cuda:0", 0), ("cuda:0", 0)]
        places = [place for _, place in assignments(gang, NONE)]
        assert [(a["visible"], a["local_rank"], a["local_size"]) for a in places] == [(["0"], 0, 1)] * 2

    def test_without_uuids_an_address_that_comes_twice_shows_that_executors_are_isolated(self) -> None:
        members = [member(k, "a", gpu) for k, gpu in enumerate("0011")]
        for m in members:
            m.executor = f"executor {m.partition % 2}"
        gang = assign_ranks(members)
        assert [(m.partition, m.gpus, m.local_rank) for m in gang] == [
            (0, ("0",), 0),
            (2, ("1",), 1),
            (1, ("0",), 0),
            (3, ("1",), 1),
        ]
        assert [place["visible"] for _, place in assignments(gang, NONE)] == [["0", "1"]] * 4

    def test_executors_that_see_the_same_gpus_are_one_group(self) -> None:
        members = [member(k, "a", gpu) for k, gpu in enumerate("10")]
        for m in members:
            m.executor, m.listed = f"executor {m.partition}", {"0": "GPU-a", "1": "GPU-b"}
        gang = assign_ranks(members)
        assert [(m.gpus, m.peer(NONE)["device"]) for m in gang] == [(("0",), "cuda:0"), (("1",), "cuda:1")]
        assert [place["visible"] for _, place in assignments(gang, NONE)] == [["0", "1"]] * 2

    def test_ranks_share_one_where_they_ask_for_half(self) -> None:
        half = Accelerators(amount=0.5)
        members = [member(k, "a", gpu) for k, gpu in enumerate("0101")]
        for m in members:
            m.listed = {"0": "GPU-a", "1": "GPU-b"}
        assert device_problem(members, half) is None
        gang = assign_ranks(members)
        assert [(m.gpus, m.peer(half)["device"]) for m in gang] == [
            (("0",), "cuda:0"),
            (("0",), "cuda:0"),
            (("1",), "cuda:1"),
            (("1",), "cuda:1"),
        ]
        assert [a["visible"] for _, a in assignments(gang, half)] == [["0", "1"]] * 4
        problem = device_problem([*members, member(4, "a", "GPU-a")], half)
        assert problem is not None
        assert "were given the same GPU, GPU-a: " in str(problem)
        assert "2 ranks share a GPU" in str(problem)

    def test_a_task_without_its_devices_is_no_rank_on_a_cpu(self, start: Start) -> None:
        gang = start(1, accelerators=Accelerators(amount=2, resource="npu"))
        gang.hello(0, gpus=["0"]).send("ready", pid=1)
        gang.until(lambda: gang.coordinator.failure, "the failure is known")
        error = gang.coordinator.failure.error() if gang.coordinator.failure else None
        assert isinstance(error, BadSetting)
        assert "gave task 0 on a 1 npu, and a rank needs 2 npu (gpus=2). Set spark.task.resource.npu.amount=2." in str(
            error
        )

    def test_a_gpu_that_two_ranks_were_given_is_an_error_before_they_begin(self, start: Start) -> None:
        gang = start(2)
        for partition in range(2):
            channel = gang.hello(partition, host="b", gpus=["0"])
            channel.send("ready", pid=partition, gpus={"0": "GPU-a"})
        gang.until(lambda: gang.coordinator.failure, "the failure is known")
        error = gang.coordinator.failure.error() if gang.coordinator.failure else None
        assert isinstance(error, BadSetting)
        assert "Tasks 0 and 1 were given the same GPU, GPU-a: it is '0' on b, and '0' on b." in str(error)
        assert not gang.coordinator.formed

    def test_over_sockets_each_learns_its_own_place_and_everyones(self, start: Start) -> None:
        gang = start(3)
        channels = [gang.hello(0, host="b"), gang.hello(1, host="a"), gang.hello(2, host="b")]
        assert gang.coordinator.missing() == [0, 1, 2]
        for channel in channels[::-1]:
            channel.send("ready", pid=50)
        told = [heard(channel, "assign") for channel in channels]
        assert [(t["rank"], t["local_rank"], t["local_size"]) for t in told] == [(0, 0, 2), (2, 0, 1), (1, 1, 2)]
        assert len({t.blob for t in told}) == 1
        assert [(p["rank"], p["host"], p["pid"], p["device"]) for p in json.loads(told[0].blob)] == [
            (0, "b", 50, "cpu"),
            (1, "b", 50, "cpu"),
            (2, "a", 50, "cpu"),
        ]
        assert gang.coordinator.missing() == []

    def test_what_a_rank_prints_before_it_has_its_number_is_kept_for_it(self, start: Start) -> None:
        gang = start(2)
        first, second = gang.hello(0, host="b", gpus=["1"]), gang.hello(1, host="b", gpus=["0"])
        first.send("output", b"early\n")
        first.send("ready", pid=1)
        second.send("ready", pid=2)
        assert heard(first, "assign")["rank"] == 1
        gang.until(lambda: gang.coordinator.formed, "the gang has formed")
        assert gang.observer.text == {1: "early\n"}


class TestMeetings:
    def all_gather(self, channel: Client, operation: str, value: bytes = b"", number: int = 0) -> None:
        channel.send("gather", value, number=number, operation=operation)

    def test_everyone_hears_every_value_in_rank_order(self, start: Start) -> None:
        gang = start(3)
        supervisors = gang.form()
        for number in range(3):
            for rank in (2, 0, 1):
                self.all_gather(supervisors[rank], "gather", b"%d" % rank * (rank + 1), number)
            for channel in supervisors:
                message = heard(channel, "gathered")
                assert (message.blob, message["lengths"], message["number"]) == (b"011222", [1, 2, 3], number)
        wait(lambda: gang.coordinator.all_gathers.open == {}, "no gather is kept", SECONDS)

    def test_each_tag_counts_its_own_calls(self, start: Start) -> None:
        gang = start(2)
        one, two = gang.form()
        one.send("gather", b"a", tag="background", number=0, operation="save")
        self.all_gather(one, "gather", b"x")
        self.all_gather(two, "gather", b"y")
        two.send("gather", b"b", tag="background", number=0, operation="save")
        for channel in (one, two):
            found = [heard(channel, "gathered") for _ in range(2)]
            told = {(m["tag"], m["number"], m.blob) for m in found}
            assert told == {("main", 0, b"xy"), ("background", 0, b"ab")}

    def test_what_a_rank_notes_and_saves_is_an_event(self, start: Start) -> None:
        gang = start(2)
        _, two = gang.form()
        two.send("note", text="as you see")
        two.send("checkpoint", step=5, bytes=100, seconds=0.1, path="/runs/1")
        gang.observer.await_event("checkpoint")
        assert gang.observer.of("note") == [{"text": "as you see"}]
        assert gang.observer.of("checkpoint") == [
            {"rank": 1, "step": 5, "bytes": 100, "seconds": 0.1, "path": "/runs/1"}
        ]

    def test_different_calls_are_named_on_both_sides(self, start: Start) -> None:
        supervisors = start(2).form()
        self.all_gather(supervisors[0], "gather")
        self.all_gather(supervisors[1], "barrier")
        for channel in supervisors:
            problem = heard(channel, "gathered")["problem"]
            assert problem.startswith("Ranks disagree about call 1: rank 0 calls gather(), rank 1 calls barrier().")

    def test_a_rank_that_returns_while_another_waits(self, start: Start) -> None:
        supervisors = start(3).form()
        self.all_gather(supervisors[0], "barrier")
        supervisors[1].send("finished")
        problem = heard(supervisors[0], "gathered")["problem"]
        assert problem == "rank 1 has returned and will never reach barrier(), where rank 0 waits."

    def test_a_rank_that_has_returned_before_another_waits(self, start: Start) -> None:
        gang = start(3)
        supervisors = gang.form()
        supervisors[2].send("finished")
        gang.observer.await_event("rank_ended")
        for channel in supervisors[:2]:
            self.all_gather(channel, "gather")
            assert "rank 2 has returned and will never reach gather()" in heard(channel, "gathered")["problem"]

    def test_too_much_to_gather_is_said_to_all_who_came(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(all_gather, "MAX_BLOB", 1000)
        supervisors = start(2).form()
        for channel in supervisors:
            self.all_gather(channel, "gather", bytes(600))
        for channel in supervisors:
            problem = heard(channel, "gathered")["problem"]
            assert "2 of 2 ranks are 1,200 bytes together" in problem
            assert "one call takes 1,000 of all ranks" in problem


def column(name: str, shape: list[int] | None) -> dict[str, Any]:
    return {"name": name, "shape": shape}


class TestRows:
    def receipt(self, channel: Client, rows: dict[str, int], *columns: dict[str, Any]) -> None:
        body = {"columns": {name: list(columns) for name in rows}, "fingerprint": {}}
        channel.send("receipt", json.dumps(body).encode(), rows=rows)

    def test_an_empty_shard_learns_its_shape_from_the_others(self, start: Start) -> None:
        supervisors = start(2, names=["train"]).form()
        self.receipt(supervisors[0], {"train": 0}, column("x", None))
        self.receipt(supervisors[1], {"train": 5}, column("x", [3]))
        for channel in supervisors:
            assert json.loads(heard(channel, "spooled").blob) == {"train": {"x": [3]}}
            assert json.loads(heard(channel, "fingerprint").blob) == {}
            mark = heard(channel, "mark")
            assert (mark["name"], sorted(mark["ended"])) == ("train", [[0, 0], [1, 5]])

    def test_widths_that_disagree_are_one_error_on_every_rank(self, start: Start) -> None:
        gang = start(2, names=["train"])
        supervisors = gang.form()
        self.receipt(supervisors[1], {"train": 5}, column("x", [4]))
        self.receipt(supervisors[0], {"train": 5}, column("x", [3]))
        said = {str(heard(channel, "end")["reason"]) for channel in supervisors}
        assert len(said) == 1
        assert gang.coordinator.failure is not None
        error = gang.coordinator.failure.error()
        assert isinstance(error, BadRow)
        assert error.column == "x"
        assert str(error).startswith("train: rows of column 'x' have the shape [3] on rank 0 and [4] on rank 1.")

    def test_agree_takes_what_anyone_knows(self) -> None:
        shapes, problem = agree({0: {"a": [column("x", None)]}, 1: {"a": [column("x", [2, 2]), column("y", [])]}})
        assert (shapes, problem) == ({"a": {"x": [2, 2], "y": []}}, None)

    def test_the_watermark_is_what_every_rank_can_take(self, start: Start) -> None:
        supervisors = start(2, names=["train"], stream=True).form()
        supervisors[0].send("rows", rows={"train": 100})
        supervisors[1].send("rows", rows={"train": 40})
        for channel in supervisors:
            assert heard(channel, "mark")["rows"] == 40
        self.receipt(supervisors[1], {"train": 60}, column("x", []))
        marks = [heard(channel, "mark") for channel in supervisors]
        assert [(mark["rows"], mark["ended"]) for mark in marks] == [(100, [[1, 60]])] * 2

    @pytest.mark.parametrize("together", [True, False])
    def test_what_a_rank_is_sent_of_rows_grows_with_the_ranks_and_not_with_their_square(
        self, start: Start, together: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tritium.gang.coordinator.rows.MARK_SECONDS", 3600.0 if together else 0.0)
        sent: dict[int, int] = {}
        for size in (128, 512):
            coordinator = start(size, names=["train"], stream=True).coordinator
            feed, marks = Feed(), list[bytes]()

            def send(kind: str, **fields: Any) -> None:
                assert kind == "mark"
                marks.append(json.dumps(fields).encode())  # noqa: B023 - called in this turn
                ended = {int(rank): int(rows) for rank, rows in fields["ended"]}
                feed.publish(Watermark(fields["rows"], ended, size))  # noqa: B023

            monkeypatch.setattr(coordinator, "broadcast", send)
            for rank in range(size):
                coordinator.rows.mark("train", rank, 1000 + rank, ended=False)
            for rank in range(size):
                coordinator.rows.mark("train", rank, 2000 + rank, ended=True)
            assert feed.counts() == [2000 + rank for rank in range(size)]
            assert len(marks) <= (3 if together else 2 * size + 1)
            sent[size] = sum(map(len, marks))
        assert sent[512] < 6 * sent[128]  # four times the ranks: 64 times as much for all of them before, now 16
        assert sent[512] < 512 * 100

    def test_ends_that_come_together_are_told_together_and_soon(self, start: Start) -> None:
        supervisors = start(3, names=["train"], stream=True).form()
        for channel in supervisors:
            channel.send("rows", rows={"train": 10})
        assert heard(supervisors[0], "mark")["rows"] == 10
        for channel in supervisors[1:]:
            self.receipt(channel, {"train": 20}, column("x", []))
        ended: list[list[int]] = []
        while len(ended) < 2:
            ended += heard(supervisors[0], "mark")["ended"]
        assert sorted(ended) == [[1, 20], [2, 20]]

    def test_rows_that_come_before_the_gang_has_formed_are_kept(self, start: Start) -> None:
        gang = start(2, names=["train"])
        supervisors = [gang.hello(0), gang.hello(1)]
        for channel in supervisors:
            self.receipt(channel, {"train": 3}, column("x", []))
        for channel in supervisors:
            channel.send("ready", pid=1)
        for channel in supervisors:
            for kind in ("assign", "spooled", "fingerprint", "mark"):
                heard(channel, kind)
        assert {rank: receipt["rows"] for rank, receipt in gang.coordinator.rows.receipts.items()} == {
            0: {"train": 3},
            1: {"train": 3},
        }


class TestTheEnd:
    def test_all_have_returned(self, start: Start) -> None:
        gang = start(2)
        supervisors = gang.form()
        supervisors[1].send("finished")
        supervisors[0].send("finished")
        for channel in supervisors:
            heard(channel, "finished")
        gang.until(lambda: gang.coordinator.finished, "it is finished")
        for channel in supervisors:
            channel.close()
        gang.coordinator.await_gone(SECONDS)
        assert gang.coordinator.failure is None

    def test_a_supervisor_that_is_gone_is_a_lost_rank(self, start: Start) -> None:
        gang = start(3)
        supervisors = gang.form()
        supervisors[1].close()
        for channel in (supervisors[0], supervisors[2]):
            assert heard(channel, "end")["reason"].startswith("rank 1 on a was lost")
        failure = gang.coordinator.failure
        assert failure is not None
        assert (failure.how, failure.rank, failure.pid) == ("lost", 1, 100)

    def test_a_supervisor_that_is_gone_after_its_rank_has_returned_is_not(self, start: Start) -> None:
        gang = start(2)
        supervisors = gang.form()
        supervisors[1].send("finished")
        supervisors[1].close()
        gang.observer.await_event("rank_ended")
        supervisors[0].send("finished")
        heard(supervisors[0], "finished")
        assert gang.coordinator.failure is None

    def cut_off(self, gang: Gang) -> None:
        """Cut off a supervisor of partition 0 as when its process is killed: its connection closes without a word."""
        channel = Channel.connect(gang.coordinator.address, gang.coordinator.secret, SECONDS)
        channel.send("session", id="killed", who="task 0", first=0, received=0)
        said = {"launch": "L1", "partition": 0, "attempt": 5, "host": "a", "address": "b", "port": 1, "pid": 7}
        channel.send("hello", gpus=[], **said)
        gang.until(lambda: 0 in gang.coordinator.members, "it is known")
        channel.close()
        gang.until(lambda: gang.coordinator.members[0].session.connection is None, "its connection is closed")
        assert gang.coordinator.failure is None

    def test_who_was_killed_is_lost_once_sparks_job_has_failed(self, start: Start) -> None:
        gang = start(2)
        self.cut_off(gang)
        gang.coordinator.no_one_returns()
        gang.until(lambda: gang.coordinator.failure, "a failure is known")
        failure = gang.coordinator.failure
        assert failure is not None
        assert failure.headline().startswith("rank 0 on a was lost: its supervisor is gone (its connection broke)")

    def test_who_was_killed_is_lost_once_spark_starts_its_task_again(self, start: Start) -> None:
        gang = start(2)
        self.cut_off(gang)
        assert "was lost" in heard(gang.hello(0, attempt=6), "end")["reason"]
        assert gang.coordinator.failure is not None
        assert "Spark has started its task again, as attempt 6" in gang.coordinator.failure.headline()

    def test_who_has_finished_and_is_killed_before_spark_has_its_result_is_lost(self, start: Start) -> None:
        gang = start(2)
        first, second = gang.form()
        first.send("finished")
        gang.until(lambda: gang.coordinator.members[0].finished, "rank 0 has finished")
        again = heard(gang.hello(0, attempt=6), "end")
        assert again["refused"], "two tasks of one partition: the later one must fail, not end as if it were done"
        assert gang.coordinator.failure is None
        first.close()
        gang.until(lambda: gang.coordinator.members[0].session.connection is None, "its connection is closed")
        late = heard(gang.hello(0, attempt=7), "end")
        assert "was lost" in late["reason"]
        assert not late["refused"], "the driver says why: a task that fails as well is 40 lines in Spark's log"
        assert gang.coordinator.failure is not None
        assert gang.coordinator.failure.how == "lost"
        second.close()

    def test_the_first_failure_counts_and_everyone_hears_it(self, start: Start) -> None:
        gang = start(2)
        supervisors = gang.form()
        for rank in (1, 0):
            failure = Failure.of(KeyError(f"of rank {rank}"), rank, host="a")
            supervisors[rank].send("failed", failure.pickled, **failure.fields())
            gang.until(lambda: gang.coordinator.failure, "a failure is known")
        for channel in supervisors:
            told = heard(channel, "end")
            assert Failure.read(told["failure"], told.blob).cause().args == ("of rank 1",)  # type: ignore[union-attr]
        assert len(gang.observer.of("failed")) == 1

    def test_an_echo_waits_for_the_death_that_caused_it(self, start: Start) -> None:
        gang = start(2)
        supervisors = gang.form()
        echo = Failure.of(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), 0, host="a")
        supervisors[0].send("failed", echo.pickled, **echo.fields())
        killed = Failure(how="signal", rank=1, host="a", signal="SIGKILL")
        supervisors[1].send("failed", b"", **killed.fields())
        gang.until(lambda: gang.coordinator.failure, "a failure is known")
        assert gang.coordinator.failure == killed

    def test_an_echo_that_stays_alone_is_the_failure(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(first_failure, "CAUSE_SECONDS", 0.05)
        gang = start(2)
        echo = Failure.of(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection refused"), 0, host="a")
        gang.form()[0].send("failed", echo.pickled, **echo.fields())
        gang.until(lambda: gang.coordinator.failure, "a failure is known")
        assert gang.coordinator.failure == echo

    def test_who_left_comes_before_who_only_heard_of_it(self, start: Start) -> None:
        gang = start(2)
        supervisors = gang.form()
        echo = Failure.of(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), 0, host="a")
        supervisors[0].send("failed", echo.pickled, **echo.fields())
        left = Failure(how="exit", rank=1, host="a", exit_code=3)
        supervisors[1].send("failed", b"", **left.fields())
        gang.until(lambda: gang.coordinator.failure, "a failure is known")
        assert gang.coordinator.failure is not None
        assert (gang.coordinator.failure.rank, gang.coordinator.failure.exit_code) == (1, 3)

    def test_abort_ends_every_rank_and_blames_none(self, start: Start) -> None:
        gang = start(2)
        supervisors = gang.form()
        gang.coordinator.abort("Ctrl-C")
        assert [heard(channel, "end")["reason"] for channel in supervisors] == ["Ctrl-C"] * 2
        assert gang.coordinator.failure is None

    def test_who_comes_after_an_abort_is_ended_too(self, start: Start) -> None:
        gang = start(2)
        first = gang.hello(0)
        gang.until(lambda: 0 in gang.coordinator.members, "it is known")
        gang.coordinator.abort("Ctrl-C")
        assert heard(first, "end")["reason"] == "Ctrl-C"
        late = heard(gang.hello(1), "end")
        assert "Ctrl-C" in late["reason"]
        assert not late["refused"], "its task ends as the others do"
        assert not gang.coordinator.formed

    @pytest.mark.parametrize("how", ["another fails", "closed"])
    def test_what_was_printed_before_the_ranks_were_assigned_is_shown(self, start: Start, how: str) -> None:
        gang = start(3)
        first, second = gang.hello(0), gang.hello(1)
        first.send("output", b"warning: this import takes long\n")
        if how == "another fails":
            failure = Failure.of(ImportError("no such module"), 1, host="a")
            second.send("failed", failure.pickled, **failure.fields())
            gang.until(lambda: gang.coordinator.failure, "a failure is known")
            first.send("output", b"and this came later\n")
        first.close()
        gang.close()
        assert gang.observer.text[0].startswith("warning: this import takes long\n")
        assert gang.observer.text[0].endswith("and this came later\n") == (how == "another fails")

    def test_close_hangs_up_and_frees_the_port(self, start: Start) -> None:
        gang = start(1)
        (supervisor,) = gang.form()
        gang.close()
        assert supervisor.receive() is None
        assert gang.coordinator.address[1] not in listening()

    def test_one_that_never_served_can_be_closed(self) -> None:
        Coordinator(1, launch="L1", observer=Observer()).close()

    def test_an_observer_that_fails_ends_the_run_and_says_why(self, start: Start) -> None:
        class Full(Observer):
            def event(self, event: Event) -> None:
                if isinstance(event, Logged):
                    raise OSError(28, "No space left on device")
                super().event(event)

        gang = start(1, observer=Full())
        (supervisor,) = gang.form()
        supervisor.send("log", values={"loss": 1.0})
        assert supervisor.receive() is None
        gang.until(lambda: gang.coordinator.failure, "a failure is known")
        assert gang.coordinator.failure is not None
        assert "No space left on device" in gang.coordinator.failure.headline()


def test_what_ranks_say_reaches_the_observer(start: Start) -> None:
    gang = start(1)
    (supervisor,) = gang.form()
    supervisor.send("output", "größer\n".encode())
    supervisor.send("log", step=3, values={"loss": 0.5})
    supervisor.send("store", b"abc", name="w.bin", start=0, size=None, checksum=None)
    supervisor.send("store", b"", name="w.bin", start=3, size=3, checksum=7)
    supervisor.send("counts", name="train", epoch=0, used=5)
    gang.observer.await_event("counts")
    assert gang.observer.text == {0: "größer\n"}
    assert gang.observer.of("log") == [{"rank": 0, "step": 3, "values": {"loss": 0.5}}]
    assert gang.observer.stored == [Piece("w.bin", b"abc"), Piece("w.bin", b"", 3, 3, 7)]
    (counts,) = gang.observer.of("counts")
    assert counts.items() >= {"rank": 0, "name": "train", "used": 5, "padded": 0}.items()


def status(**facts: Any) -> dict[str, Any]:
    """Return what a supervisor reports of its rank about once a second."""
    quiet = dict.fromkeys(("seconds", "quiet", "idle", "rows_quiet"), 0.0)
    word = {
        "step": None,
        "epoch": None,
        "step_limit": 0.0,
        "taken": 0,
        "receiving": False,
        "rows": {},
        "doing": "other",
    }
    return {**quiet, **word, "phase": "importing torch", "state": "S", **facts}


class TestStalls:
    def test_who_is_missing_at_the_start_and_what_it_does(self, start: Start) -> None:
        gang = start(4)
        coordinator = gang.coordinator
        gang.hello(0).send("ready", pid=1)
        gang.hello(2).send("ready", pid=1)
        gang.hello(3, host="b").send("status", **status(seconds=12.0))
        wait(lambda: len(coordinator.missing()) == 2 and len(coordinator.members) == 3, "three have come", SECONDS)
        wait(lambda: coordinator.members[3].status, "the status is heard", SECONDS)
        assert missing_note(coordinator, 4) == (
            "2 of 4 ranks have reported; still missing: task 1 (not started: no slot, or its source is still being "
            "computed); task 3 (host b, importing torch for 12 s)"
        )

    def test_every_rank_is_asked_for_its_stacks_and_one_that_does_not_answer_is_named_too(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stall_alarm, "STACKS_SECONDS", 0.5)
        gang = start(2, stall_limit=StallLimit(2.0))
        one, two = gang.form()
        one.send("status", **status(step=310, taken=310, phase="step 310", doing="step", quiet=3.0))
        two.send("status", **status(step=309, taken=309, phase="step 309", doing="step", quiet=3.0))
        number = heard(one, "stacks")["number"]
        assert heard(two, "stacks")["number"] == number
        one.send("stacks", b"the stack", number=number, where="in f() at f.py:1", collective="all_reduce", why="")
        gang.until(lambda: gang.coordinator.failure, "the stall is told")
        error = gang.coordinator.failure.error("/runs/1")  # type: ignore[union-attr]
        assert isinstance(error, Stalled)
        assert (error.rank, error.step, error.phase) == (1, 309, "step 309")
        assert "rank 1 (host a): step 309, its supervisor does not answer" in str(error)
        assert error.stacks == {0: "the stack", 1: "(no stack: its supervisor does not answer)\n"}
        assert [piece.name for piece in gang.observer.stored] == ["stacks/rank-0.txt", "stacks/rank-1.txt"]
        assert "hangs" in heard(one, "end")["reason"]

    def test_a_rank_that_moves_again_meanwhile_is_left_alone(self, start: Start) -> None:
        gang = start(1, stall_limit=StallLimit(2.0))
        (one,) = gang.form()
        one.send("status", **status(step=1, quiet=3.0))
        number = heard(one, "stacks")["number"]
        one.send("status", **status(step=2))
        one.send("stacks", b"", number=number, where="", collective="", why="")
        one.send("finished")
        heard(one, "finished")
        assert gang.coordinator.failure is None

    def test_a_status_that_is_none_is_refused(self, start: Start) -> None:
        gang = start(1)
        gang.form()[0].send("status", step="first")
        gang.until(lambda: gang.coordinator.failure, "it is refused")
