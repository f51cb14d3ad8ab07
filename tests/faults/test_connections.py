"""The control connections of a run under all kinds of network faults: slower, but not failed; or ended in time.

`TRITIUM_FAULT_ROUNDS` rounds with other seeds each; a seed is printed when its round fails.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

import tritium as tr
from bounds import timed, within
from clusters import wait
from machines import Cable, Machine, Observer, can_make_hosts, hosts, order_for, serving
from proxy import Proxy, before_coordinators
from ranks import reduce_for_ever
from tritium.errors import RankFailed, WireError
from tritium.gang.control import client as client_module
from tritium.gang.control.client import Client
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.stall_limit import StallLimit
from tritium.wire import MAGIC, NONCE, Challenge, Channel, Codec, Message

ROUNDS = int(os.environ.get("TRITIUM_FAULT_ROUNDS", "1"))
SEEDS = [20_000 + number for number in range(ROUNDS)]


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proxy]]:
    """Put every coordinator that a launch makes behind a proxy, which is in the list yielded."""
    with before_coordinators(monkeypatch) as proxies:
        yield proxies


@contextlib.contextmanager
def running(order: Any, count: int) -> Iterator[list[Machine]]:
    machines: list[Machine] = []
    try:
        for partition in range(count):
            machines.append(Machine(order, partition))
        yield machines
    finally:
        for machine in machines:
            machine.close()


def launch(function: Callable[..., Any], ranks: int, run_dir: Path, *args: Any, **settings: Any) -> list[Any]:
    return tr.launch(
        function,
        ranks=ranks,
        on="driver",
        args=args,
        run_dir=str(run_dir),
        **{"progress": False, "output": "none", "retries": 0, **settings},
    )


class Away:
    """A launch in a thread of its own, so that the test can interfere."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.took = 0.0
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        self.took = time.monotonic() - began

    def end(self, seconds: float) -> Any:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the launch still runs after {seconds} s"
        if self.error is not None:
            raise self.error
        return self.result


def there(place: Path, count: int) -> list[int]:
    """Return the pids that so many ranks have written into a directory."""
    wait(lambda: len(list(place.glob("pid-*"))) == count, f"{count} ranks run")
    return [int(file.name.removeprefix("pid-")) for file in place.glob("pid-*")]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = run_dir.joinpath("events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


# ---- what ranks do


def everything(steps: int, size: int) -> tuple[list[Any], list[int]]:
    """Gather, log, print, take rows while they stream in, store a file of some megabytes."""
    world = tr.world()
    seen: list[int] = []
    gathered = []
    for epoch in world.shard("train").epochs(1, batch_size=64):
        for batch in epoch:
            seen += batch["x"].astype(int).tolist()
    for step in range(steps):
        print(f"rank {world.rank} says {step}", flush=True)
        world.log(step=step, value=world.rank * 1000 + step)
        gathered.append(world.gather((world.rank, step)))
    blob = bytes([world.rank]) * size
    gathered.append([len(value) for value in world.gather(blob)])
    world.store(f"file-{world.rank}", (blob[i : i + (1 << 20)] for i in range(0, size, 1 << 20)))
    return gathered, seen


def gather_for(place: str, seconds: float) -> int:
    world = tr.world()
    Path(place, f"pid-{os.getpid()}").touch()
    began, meetings = time.monotonic(), 0
    while world.gather(time.monotonic() - began)[0] < seconds:
        meetings += 1
        print(f"gather {meetings}", flush=True)
        time.sleep(0.02)
    return meetings


def gather_until(place: str) -> int:
    world = tr.world()
    Path(place, f"pid-{os.getpid()}").touch()
    meetings = 0
    while not any(world.gather(Path(place, "enough").exists())):
        meetings += 1
        time.sleep(0.02)
    return meetings


# ---- slower, not failed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.timeout(240)
def test_delayed_by_200_ms_and_cut_now_and_then(tls: bool, seed: int, proxies: list[Proxy], tmp_path: Path) -> None:
    steps, size, rows = 8, 4 << 20, 2000
    table = pa.table({"x": np.arange(rows, dtype=np.float64)})
    chance = random.Random(seed)
    data = {"train": tr.Data(table, shuffle="stream")}
    run = Away(lambda: launch(everything, 3, tmp_path, steps, size, data=data, tls=tls))
    wait(lambda: bool(proxies), "the launch has begun")
    proxies[0].delay = 0.2
    with proxies[0].cutting(chance, *((2.5, 5.0) if tls else (0.8, 3.0))):  # To connect takes 8 delays, and 5 without.
        results = run.end(200)
    assert [gathered for gathered, _ in results] == [
        [[(rank, step) for rank in range(3)] for step in range(steps)] + [[size] * 3]
    ] * 3
    assert sorted(x for _, seen in results for x in seen) == list(range(rows))
    logs = events(tmp_path, "log")
    for rank in range(3):
        said = tmp_path.joinpath("logs", f"rank-{rank}.log").read_text().splitlines()
        assert said == [f"rank {rank} says {step}" for step in range(steps)]
        assert [(log["step"], log["values"]["value"]) for log in logs if log["rank"] == rank] == [
            (step, rank * 1000 + step) for step in range(steps)
        ]
        assert tmp_path.joinpath(f"file-{rank}").read_bytes() == bytes([rank]) * size
    cut, back = events(tmp_path, "disconnected"), events(tmp_path, "reconnected")
    print(f"{run.took:.1f} s, {proxies[0].cuts} cuts, {len(cut)} connections lost, {len(back)} made again")
    assert proxies[0].cuts >= 2
    assert back


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tls", [False, True])
def test_cut_as_often_as_can_be(tls: bool, seed: int, proxies: list[Proxy], tmp_path: Path) -> None:
    data = {"train": pa.table({"x": np.arange(90.0)})}
    run = Away(lambda: launch(everything, 2, tmp_path, 60, 9 << 20, data=data, tls=tls))
    wait(lambda: bool(proxies), "the launch has begun")
    with proxies[0].cutting(random.Random(seed), 0.001, 0.6 if tls else 0.15):
        results = run.end(120)
    assert [len(gathered) for gathered, _ in results] == [61, 61]
    for rank in range(2):
        said = tmp_path.joinpath("logs", f"rank-{rank}.log").read_text().splitlines()
        assert said == [f"rank {rank} says {step}" for step in range(60)]
        assert tmp_path.joinpath(f"file-{rank}").read_bytes() == bytes([rank]) * (9 << 20)
    print(f"{run.took:.1f} s, {proxies[0].cuts} cuts, {len(events(tmp_path, 'reconnected'))} connections made again")


def side_by_side(proxies: list[Proxy], place: Path, *job: Any) -> Iterator[tuple[Path, Away, Callable[..., None]]]:
    """Launch the same job twice. Yield the directory, the launch, and what cuts off its server (refused; silent)."""
    for how in ("refuse", "freeze"):
        folder, number = place / how, len(proxies)
        folder.mkdir()
        run = Away(functools.partial(launch, job[0], 2, folder, str(folder), *job[1:]))
        wait(lambda number=number: len(proxies) > number, "the launch has begun")
        yield folder, run, getattr(proxies[-1], how)


def test_5_s_without_the_control_server(proxies: list[Proxy], tmp_path: Path) -> None:
    """Refused, and silent, in two launches at once."""
    both = list(side_by_side(proxies, tmp_path, gather_for, 8.0))
    for folder, _, _ in both:
        there(folder, 2)
    for _, _, darken in both:  # not while the other launch begins, which may take seconds
        darken()
    time.sleep(5.0)
    for _, _, darken in both:
        darken(False)
    for folder, run, _ in both:
        meetings = run.end(30)
        assert len(set(meetings)) == 1
        for rank in range(2):
            said = folder.joinpath("logs", f"rank-{rank}.log").read_text().splitlines()
            assert said == [f"gather {number + 1}" for number in range(meetings[0])]


def test_a_driver_that_stands_still_for_a_while(tmp_path: Path) -> None:
    """Ctrl-Z, and after 9 s `fg`: longer than any silence that either end would bear."""
    code = DRIVER.format(path=[str(Path(__file__).parent), *sys.path], place=str(tmp_path), how="launch")
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        there(tmp_path, 2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(9.0)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        tmp_path.joinpath("enough").touch()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


# ---- ended in time


def test_no_control_server_any_more(proxies: list[Proxy], tmp_path: Path) -> None:
    """Refused, and silent, in two launches at once."""
    both = list(side_by_side(proxies, tmp_path, gather_until))
    pids = [pid for folder, _, _ in both for pid in there(folder, 2)]
    began = time.monotonic()
    for _, _, darken in both:
        darken()
    wait(lambda: not any(map(alive, pids)), "the ranks are gone", 10)
    within("control server gone for good", time.monotonic() - began)
    for _, run, _ in both:
        with pytest.raises(RankFailed, match=r"was lost: its supervisor is gone"):
            run.end(15)
    assert time.monotonic() - began < 15


def test_a_silent_connection_and_a_host_that_stands_still(tmp_path: Path) -> None:
    """Of each of two gangs, side by side, one of two supervisors.

    One is behind a network that swallows everything, and nothing is closed. The other stands still with its rank for
    longer than it is waited for: what wakes up can't continue.
    """
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(serving(2)) for _ in range(2))
        proxy = Proxy(first.address)
        stack.callback(proxy.close)

        def start(coordinator: Coordinator, partition: int, **changes: Any) -> Machine:
            machine = Machine(order_for(coordinator, gather_until, str(tmp_path), **changes), partition)
            stack.callback(machine.close)
            return machine

        silent, hears = start(first, 0, address=proxy.address), start(first, 1)
        goes_on, stopped = start(second, 0), start(second, 1)
        there(tmp_path, 4)
        began = time.monotonic()
        proxy.freeze()
        stopped.stop()
        stack.callback(stopped.resume)
        for coordinator, rank in ((first, 0), (second, 1)):
            with coordinator.changed:
                assert coordinator.changed.wait_for(lambda c=coordinator: c.failure is not None, 15)
            within("silent control connection", time.monotonic() - began)
            assert coordinator.failure is not None
            assert (coordinator.failure.how, coordinator.failure.rank) == ("lost", rank)
        assert "was lost" in hears.end(5), "the other one hears at once what happened"
        assert "coordinator is gone" in silent.end(5)
        assert "was lost" in goes_on.end(5)
        ranks = [process.pid for process in stopped.processes()]
        stopped.resume()
        said = stopped.end(10)
        assert "nothing was heard of it for" in said or "the coordinator is gone" in said
        wait(lambda: not any(map(alive, ranks)), "its rank is gone too", 5)


def test_a_late_session_is_refused_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "GRACE", 60.0)
    with serving(1) as coordinator, contextlib.ExitStack() as stack:
        proxy = Proxy(coordinator.address)
        stack.callback(proxy.close)
        line = Client(proxy.address, coordinator.secret, "task 0", 5)
        stack.callback(line.close)
        hello(line)
        wait(lambda: bool(coordinator.members), "it is known")
        coordinator._server.away_limit = 1.0
        proxy.refuse()
        with coordinator.changed:
            assert coordinator.changed.wait_for(lambda: coordinator.failure is not None, 15)
        proxy.refuse(False)
        while (message := line.receive()) is not None:
            assert message.kind not in ("assign", "gathered")
        assert str(line.reason).startswith("nothing was heard of it for")
        observer = coordinator.observer
        assert isinstance(observer, Observer)
        assert any("task 0 came back, but nothing was heard" in said["reason"] for said in observer.of("refused"))
        with pytest.raises(WireError, match="nothing was heard of it"):
            line.send("output", b"too late")


def hello(line: Client, partition: int = 0) -> None:
    said = {"launch": "L1", "attempt": 0, "host": "a", "address": "127.0.0.1", "port": 1, "pid": 7, "gpus": []}
    line.send("hello", partition=partition, **said)


# ---- the driver killed


DRIVER = """
import sys
sys.path[:0] = {path!r}
import test_connections as t
t.driver({place!r}, {how!r})
"""


def driver(place: str, how: str) -> None:
    """Run a gang in the process that will be killed."""
    if how == "launch":
        launch(gather_until, 2, Path(place), place, data={"train": pa.table({"x": np.arange(1000.0)})})
        return
    with serving(2) as coordinator, running(order_for(coordinator, gather_until, place), 2) as machines:
        Path(place, "port").write_text(str(coordinator.address[1]))
        Path(place, "supervisors").write_text(" ".join(str(machine.process.pid) for machine in machines))
        threading.Event().wait()


@pytest.mark.parametrize("how", ["launch", "executors"])
def test_the_driver_is_killed(how: str, tmp_path: Path) -> None:
    """With its supervisors in it, as with on="driver"; and with supervisors that outlive it, as on executors."""
    spools = tmp_path / "spools"
    spools.mkdir()
    code = DRIVER.format(path=[str(Path(__file__).parent), *sys.path], place=str(tmp_path), how=how)
    environment = {**os.environ, "SPARK_LOCAL_DIRS": str(spools), "TMPDIR": str(spools)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        pids = there(tmp_path, 2)
        if how == "executors":
            pids += map(int, tmp_path.joinpath("supervisors").read_text().split())
        else:
            assert {
                pid for child in psutil.Process(process.pid).children(recursive=True) for pid in [child.pid]
            } >= set(pids)
    finally:
        process.kill()
        process.wait()
    with timed("driver killed, on='driver'" if how == "launch" else "driver killed, supervisors of their own"):
        wait(lambda: not any(map(alive, pids)), "every process is gone", 10)
    assert [entry for entry in spools.rglob("*") if "tritium" in entry.name] == []
    if how == "executors":
        port = int(tmp_path.joinpath("port").read_text())
        assert port not in {c.laddr.port for c in psutil.net_connections("tcp4") if c.status == psutil.CONN_LISTEN}


# ---- a host's network cut


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_a_hosts_cable_is_pulled_and_put_in_again(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("old", "new")]
    for place in places:
        place.mkdir()
    with hosts(2) as (first, second), contextlib.ExitStack() as stack:
        old = stack.enter_context(serving(2, host="0.0.0.0"))

        def start(coordinator: Coordinator, place: Path, partition: int, host: Any) -> Machine:
            address = (host.near, coordinator.address[1])
            order = order_for(coordinator, gather_until, str(place), address=address)
            machine = Machine(order, partition, inside=host.inside)
            stack.callback(machine.close)
            return machine

        stays, leaves = start(old, places[0], 0, first), start(old, places[0], 1, second)
        there(places[0], 2)
        processes = [process.pid for process in leaves.processes()]
        began = time.monotonic()
        second.plug(False)
        with old.changed:
            assert old.changed.wait_for(lambda: old.failure is not None, 15)
        found = time.monotonic() - began
        assert not any(map(alive, processes)), "the cut-off rank ends by itself before anyone takes its place"
        assert old.failure is not None
        assert (old.failure.how, old.failure.rank) == ("lost", 1)
        assert "was lost" in stays.end(5)
        # The rest continues as a new gang, while the cut-off host comes back.
        new = stack.enter_context(serving(1, host="0.0.0.0"))
        again = start(new, places[1], 0, first)
        there(places[1], 1)
        second.plug(True)
        assert "coordinator is gone" in leaves.end(15)
        places[1].joinpath("enough").touch()
        assert again.end(15) == ""
        assert new.failure is None
        within("host's network cut", found)


@contextlib.contextmanager
def one_way_cuts() -> Iterator[dict[str, tuple[Any, Callable[[], None], tuple[str, ...]]]]:
    """Yield name → coordinator of one, the address to reach it, the cut of one direction, how to start a supervisor."""
    with contextlib.ExitStack() as stack:
        cuts: dict[str, Any] = {}
        for name in ("to", "from"):
            coordinator = stack.enter_context(serving(1))
            proxy = Proxy(coordinator.address)
            stack.callback(proxy.close)
            cut = functools.partial(proxy.freeze, there=name == "to", back=name == "from")
            cuts[f"proxy, {name} the driver"] = (coordinator, proxy.address, cut, ())
        if can_make_hosts():
            for name, host in zip(("to", "from"), stack.enter_context(hosts(2)), strict=True):
                coordinator = stack.enter_context(serving(1, host="0.0.0.0"))
                address = (host.near, coordinator.address[1])
                cut = host.mute if name == "to" else host.deafen
                cuts[f"host, {name} the driver"] = (coordinator, address, cut, host.inside)
        yield cuts


def test_only_one_direction_of_a_hosts_network_is_cut(tmp_path: Path) -> None:
    """Each of them at once, in gangs of their own: found, and the rank gone before another could take its place."""
    found: dict[str, tuple[float, bool]] = {}

    def watch(name: str, coordinator: Coordinator, machine: Machine, began: float) -> None:
        processes = [process.pid for process in machine.processes()]
        with coordinator.changed:
            coordinator.changed.wait_for(lambda: coordinator.failure is not None, 20)
        found[name] = time.monotonic() - began, any(map(alive, processes))

    with one_way_cuts() as cuts, contextlib.ExitStack() as stack:
        machines = {}
        for name, (coordinator, address, _, inside) in cuts.items():
            order = order_for(coordinator, gather_until, str(tmp_path), address=address)
            machines[name] = Machine(order, 0, inside=inside)
            stack.callback(machines[name].close)
        there(tmp_path, len(cuts))
        threads = []
        for name, (coordinator, _, cut, _) in cuts.items():
            threads.append(threading.Thread(target=watch, args=(name, coordinator, machines[name], time.monotonic())))
            cut()
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert {coordinator.failure and coordinator.failure.how for coordinator, *_ in cuts.values()} == {"lost"}
        assert [name for name, (_, lives) in found.items() if lives] == [], "its rank lives when it is given up"
        within("one direction of a host's network cut", max(seconds for seconds, _ in found.values()))


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_the_network_between_two_ranks_is_cut(tmp_path: Path) -> None:
    """Both still reach the driver: nobody is lost, and nothing would ever happen again."""
    limit = StallLimit(2.0)
    with hosts(2) as both, contextlib.ExitStack() as stack:
        cable = Cable(*both)
        coordinator = stack.enter_context(serving(2, host="0.0.0.0", stall_limit=limit))
        for partition, host in enumerate(both):
            address = (host.near, coordinator.address[1])
            order = order_for(coordinator, reduce_for_ever, str(tmp_path), address=address, stall_limit=limit)
            stack.callback(Machine(order, partition, inside=host.inside).close)
        there(tmp_path, 2)
        cable.cut()
        with coordinator.changed:
            assert coordinator.changed.wait_for(lambda: coordinator.failure is not None, 15)
        failure = coordinator.failure
        assert failure is not None
        assert failure.how == "stalled", failure.text
        assert "All ranks wait in this all_reduce: what one sends does not reach another" in failure.text
        assert sorted(failure.stacks) == [0, 1]


# ---- strangers


def test_10000_mutated_frames_and_handshakes(tmp_path: Path) -> None:
    chance = random.Random(SEEDS[0])
    with serving(2) as coordinator, running(order_for(coordinator, gather_until, str(tmp_path)), 2) as machines:
        there(tmp_path, 2)
        before = psutil.Process().num_fds()
        for number in range(10_000):
            attack(coordinator, chance, handshaken=number % 2 == 1)
        wait(lambda: len(coordinator._server.connections) == 2, "only the supervisors' connections are left")
        wait(lambda: psutil.Process().num_fds() <= before, "every socket is closed")
        assert coordinator.failure is None
        observer = coordinator.observer
        assert isinstance(observer, Observer)
        assert coordinator._refused > 7000, "some are cut short and say nothing that could be refused"
        assert len(observer.of("refused")) < 300, "but strangers can't fill the disk"
        tmp_path.joinpath("enough").touch()
        assert [machine.end(15) for machine in machines] == ["", ""]
        assert coordinator.finished


def attack(coordinator: Coordinator, chance: random.Random, *, handshaken: bool) -> None:
    """Make one connection: with a wrong handshake, or with damaged frames or odd messages after a right one."""
    with socket.create_connection(coordinator.address, 10) as stranger, contextlib.suppress(ConnectionError):
        nonce = stranger.recv(len(MAGIC) + NONCE, socket.MSG_WAITALL)[len(MAGIC) :]
        if not handshaken:
            theirs = chance.randbytes(NONCE)
            stranger.sendall(mutate(theirs + prove(coordinator.secret, nonce, theirs), chance))
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                continue
            return
    if not handshaken:
        return
    channel = Channel.connect(coordinator.address, coordinator.secret, 10)
    opening = Message("session", {"id": chance.randbytes(16).hex(), "who": "x", "first": 0, "received": 0})
    said = {"launch": "L1", "partition": 0, "attempt": 0, "host": "a", "address": "b", "port": 1, "pid": 1, "gpus": []}
    frames = [opening, Message("hello", said), Message("failed", {"how": "exit", "rank": 0}), Message("finished")]
    with contextlib.suppress(WireError, OSError):
        if chance.random() < 0.5:
            codec: Codec = channel._out
            data = b"".join(b"".join(codec.encode(frame)) for frame in frames)
            channel._socket.sendall(mutate(data, chance))
        else:
            for frame in [opening] * chance.randint(0, 1) + chance.choices(ODD, k=2):
                channel.pass_on(frame)
        channel._socket.shutdown(socket.SHUT_WR)
        channel._socket.settimeout(10)
        while channel._socket.recv(4096):
            continue
    channel.close()


ODD = [
    Message("session", {"id": 3, "who": None, "first": -1, "received": "x"}),
    Message("session", {"id": "x", "who": "x", "first": 1 << 70, "received": 0}),
    Message("session", {}),
    Message("heartbeat", {"received": 1 << 70}),
    Message("heartbeat", {"received": -1}),
    Message("heartbeat", {"received": []}),
    Message("closed", {"reason": "I say so"}),
    Message("bye"),
    Message("failed", {"how": "exit", "rank": 0}),
    Message("end", {"reason": "x"}),
    Message("_drop", {}),
    Message("hello", {"launch": "L1", "partition": 1, "attempt": 9, "host": "x"}),
    Message("gather", {"number": 0, "operation": "barrier"}),
    Message("store", {"name": "../../x", "start": 0, "size": 1, "checksum": 0}, b"x"),
]


def prove(secret: bytes, server: bytes, client: bytes) -> bytes:
    import hmac

    return hmac.digest(secret, b"client" + server + client, "sha256")


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with one error."""
    at, size = chance.randrange(len(data)), chance.randint(1, 40)
    return chance.choice(
        [
            data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
            data[:at] + data[at + size :],
            data[:at] + chance.randbytes(size) + data[at:],
            data[:at] + data[at : at + size] + data[at:],
            data[:at],
        ]
    )


def test_replayed_bytes_are_refused_and_the_run_goes_on(proxies: list[Proxy], tmp_path: Path) -> None:
    """A whole connection sent again, and frames sent again within the connection that they belong to."""
    run = Away(lambda: launch(gather_until, 2, tmp_path, str(tmp_path)))
    there(tmp_path, 2)
    proxy = proxies[0]
    wait(lambda: len(proxy.sent) == 2 and all(len(sent) > 4000 for sent in proxy.sent), "much has been said")
    recorded = [bytes(sent) for sent in proxy.sent]
    for data in recorded:
        with socket.create_connection(proxy.target, 5) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(data)
            while stranger.recv(4096):
                continue
    proxy.inject(recorded[0][Challenge.size : Challenge.size + 400])
    wait(lambda: len(events(tmp_path, "reconnected")) == 2, "both have connected again")
    tmp_path.joinpath("enough").touch()
    assert len(set(run.end(20))) == 1
    reasons = [said["reason"] for said in events(tmp_path, "refused")]
    assert sum("did not prove that it knows this run's secret" in reason for reason in reasons) == 2
    assert sum("over the limit" in reason or "code is wrong" in reason for reason in reasons) == 2


# ---- the clock


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* What libfaketime does: the time of day of this process jumps when a file is there; its monotonic clock does not. */
static time_t jump(void) {
    const char *forward = getenv("CLOCK_FORWARD"), *back = getenv("CLOCK_BACK");
    if (back && access(back, F_OK) == 0) return -3600;
    if (forward && access(forward, F_OK) == 0) return 3600;
    return 0;
}

int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI) t->tv_sec += jump();
    return code;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(t, zone);
    t->tv_sec += jump();
    return code;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"""

CLOCKED = """
import sys
sys.path[:0] = {path!r}
import test_connections as t
t.clocked({place!r})
"""


def clocked(place: str) -> None:
    """Run a gang with supervisors in this process; all its processes see the clock jump."""
    results = launch(tell_times, 2, Path(place), place)
    Path(place, "result").write_text(json.dumps([results, time.time()]))


def tell_times(place: str) -> list[float]:
    world = tr.world()
    Path(place, f"pid-{os.getpid()}").touch()
    seen = [time.time()]
    for name, seconds in (("forward", 5.5), ("back", 1.0)):
        while not all(world.gather(Path(place, name).exists())):
            time.sleep(0.02)
        seen.append(time.time())
        time.sleep(seconds)  # once for longer than a connection may be silent
        world.barrier()
    return seen


def test_the_clock_jumps_an_hour(tmp_path: Path) -> None:
    library = tmp_path / "clock.so"
    source = tmp_path / "clock.c"
    source.write_text(CLOCK)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    except FileNotFoundError:
        pytest.skip("needs a C compiler")
    code = CLOCKED.format(path=[str(Path(__file__).parent), *sys.path], place=str(tmp_path))
    clock = {"CLOCK_FORWARD": str(tmp_path / "forward"), "CLOCK_BACK": str(tmp_path / "back")}
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **clock, "LD_PRELOAD": str(library)})
    try:
        there(tmp_path, 2)
        for name, seconds in (("forward", 6), ("back", 0)):
            tmp_path.joinpath(name).touch()
            time.sleep(seconds)
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()
    results, end = json.loads(tmp_path.joinpath("result").read_text())
    for before, forward, back in results:
        assert 3500 < forward - before < 3700
        assert -7300 < back - forward < -7100
    assert end < time.time() - 3500
    assert not events(tmp_path, "disconnected")
