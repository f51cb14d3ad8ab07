"""Slots are a run's from its first attempt to its end; runs side by side never wait for each other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import tritium as tr
from tritium.checkpoint.control import Regroup
from tritium.errors import RankFailed, StartTimeout
from tritium.gang.driver import launcher, on_cluster
from tritium.gang.driver.attempt import Attempt
from tritium.gang.driver.spark_job import SparkJob
from tritium.spark import slots
from tritium.spark.slots import Reservations, RunSlots

WAIT = 20.0


class Cluster:
    """A cluster as its slots are counted, which loses executors and gets them back."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.reservations = Reservations()

    def count(self) -> int:
        return self.slots

    def take(self, run: RunSlots, ranks: int, timeout: float = 0.05, note: Callable[[str], object] = str) -> None:
        run.take(self.reservations, (None, 0), ranks, self.count, timeout, note)

    def run(self, ranks: int) -> RunSlots:
        run = RunSlots()
        self.take(run, ranks)
        return run

    @contextmanager
    def waiting(self, run: RunSlots, ranks: int) -> Iterator[threading.Thread]:
        """Have `run` wait for slots in a thread, from the begin of this block until it gets them."""
        waits = threading.Event()
        thread = threading.Thread(target=self.take, args=(run, ranks, WAIT, lambda _: waits.set()))
        thread.start()
        assert waits.wait(WAIT)
        yield thread
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _recounted_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "RECOUNT_SECONDS", 0.01)


def test_a_retry_has_the_slots_that_another_launch_waits_for() -> None:
    cluster = Cluster(2)
    first, second = cluster.run(2), RunSlots()
    with cluster.waiting(second, 2) as thread:
        assert first.resize(2, 2, cluster.count) == 2
        cluster.take(first, 2)
        assert thread.is_alive()
        first.release()
    second.release()
    second.release()  # and again


def test_what_a_smaller_attempt_leaves_is_for_those_that_wait() -> None:
    cluster = Cluster(4)
    first, second = cluster.run(4), RunSlots()
    with cluster.waiting(second, 2):
        cluster.slots = 2  # an executor is lost
        assert first.resize(1, 4, cluster.count) == 2
        cluster.slots = 4  # and comes back
    assert first.resize(1, 4, cluster.count) == 2


def test_a_gang_grows_into_free_slots_only() -> None:
    cluster = Cluster(6)
    first, second = cluster.run(2), cluster.run(2)
    assert (first.room(cluster.count), second.room(cluster.count)) == (4, 4)
    assert first.resize(1, 6, cluster.count) == 4
    assert second.room(cluster.count) == 2
    assert second.resize(1, 6, cluster.count) == 2
    first.release()
    assert second.resize(1, 6, cluster.count) == 6


def test_no_gang_grows_before_a_launch_that_waits() -> None:
    cluster = Cluster(3)
    first, second = cluster.run(1), RunSlots()
    with cluster.waiting(second, 3):
        assert first.room(cluster.count) == 1
        assert first.resize(1, 3, cluster.count) == 1
        first.release()


def test_more_slots_than_there_are_are_held_until_the_executor_is_replaced() -> None:
    cluster = Cluster(2)
    first = cluster.run(2)
    cluster.slots = 1
    with pytest.raises(StartTimeout, match=r"1 needed, 1 in all.*2 ranks running"):
        cluster.run(1)
    cluster.slots = 2
    assert first.resize(2, 2, cluster.count) == 2


def test_of_two_gangs_that_lost_an_executor_one_waits_without_holding_any() -> None:
    """Both held half; now each needs all that is left."""
    cluster = Cluster(4)
    first, second = cluster.run(2), cluster.run(2)
    cluster.slots = 2
    assert first.resize(2, 2, cluster.count) == 2
    with cluster.waiting(first, 2) as thread:
        assert second.resize(2, 2, cluster.count) == 2
        cluster.take(second, 2)
        assert thread.is_alive()
        cluster.slots = 4  # the replacement ends the wait, too


def test_a_run_that_gave_its_slots_up_comes_before_those_that_came_later() -> None:
    cluster, order = Cluster(4), list[str]()
    first, second, third = cluster.run(2), cluster.run(2), RunSlots()
    with cluster.waiting(third, 2) as later:
        cluster.slots = 2
        first.resize(2, 2, cluster.count)
        with cluster.waiting(first, 2) as earlier:
            second.release()
            earlier.join(WAIT)
            order.append("first")
            assert later.is_alive()
            first.release()
    assert order == ["first"]


def test_an_interrupt_while_it_waits_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(2)
    first = cluster.run(2)

    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunSlots().take(cluster.reservations, (None, 0), 1, interrupted, WAIT, str)
    assert cluster.reservations.queue == []
    first.release()
    cluster.run(2)


def test_without_a_reservation_there_is_room_for_what_was_counted() -> None:
    run = RunSlots()  # on Connect, and under dynamic allocation
    assert run.resize(1, 3, lambda: 2) == 3
    assert run.room(lambda: 5) == 5
    run.release()


@pytest.mark.parametrize("seed", range(3))
def test_elastic_gangs_that_shrink_grow_and_fail_all_end(seed: int) -> None:
    """On a cluster whose executors come and go, no launch waits for ever, and no slot is given twice."""
    chance, cluster, over = random.Random(seed), Cluster(4), threading.Event()
    together: list[int] = []

    def launch(least: int, most: int, seed: int) -> None:
        mine, run = random.Random(seed), RunSlots()
        try:
            for _ in range(8):
                ranks = run.resize(least, min(most, max(least, cluster.slots)), cluster.count)
                cluster.take(run, ranks, WAIT)
                with cluster.reservations.changed:
                    together.append(sum(cluster.reservations.held.values()))
                time.sleep(mine.uniform(0, 0.005))
                run.room(cluster.count)
        finally:
            run.release()

    def executors() -> None:
        while not over.is_set():
            cluster.slots = chance.choice([2, 4, 4])
            time.sleep(0.003)

    breaks = threading.Thread(target=executors)
    runs = [
        threading.Thread(target=launch, args=(*sizes, seed + number))
        for number, sizes in enumerate([(1, 4), (1, 4), (2, 2), (1, 2), (4, 4)])
    ]
    for thread in (breaks, *runs):
        thread.start()
    for thread in runs:
        thread.join(WAIT)
        assert not thread.is_alive(), cluster.reservations.held
    over.set()
    breaks.join()
    assert max(together) == 4
    assert not cluster.reservations.held
    assert not cluster.reservations.queue


class Fails:
    """A launcher of attempts that take two slots of `cluster`, and end as `outcomes` tell."""

    cluster: Cluster
    outcomes: Iterator[BaseException | None]
    held: list[int]

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt

    def start(self) -> None:
        self.cluster.take(self.attempt.slots, 2)

    def wait(self) -> list[Any]:
        self.held.append(sum(self.cluster.reservations.held.values()))
        if (outcome := next(self.outcomes)) is not None:
            raise outcome
        return ["result"]

    def interrupt(self) -> None: ...
    def cancel(self) -> None:
        self.held.append(sum(self.cluster.reservations.held.values()))


def lost() -> RankFailed:
    return RankFailed("rank 1 was lost", headline="rank 1 was lost", rank=1, lost=True)


@pytest.mark.parametrize(
    ("outcomes", "raised"),
    [
        ([lost(), None], None),
        ([Regroup("slots have come back"), None], None),
        ([lost(), lost()], RankFailed),
        ([KeyboardInterrupt()], KeyboardInterrupt),
        ([ValueError("failed to start")], ValueError),
    ],
    ids=["a retry", "growth", "no more retries", "Ctrl-C", "a failed start"],
)
def test_a_run_holds_its_slots_over_all_attempts_and_none_after_it(
    outcomes: list[BaseException | None], raised: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fails.cluster, Fails.outcomes, Fails.held = Cluster(2), iter(outcomes), []
    monkeypatch.setattr(launcher, "import_module", lambda _: SimpleNamespace(OnCluster=Fails))
    with pytest.raises(raised) if raised else nullcontext():
        tr.launch(print, retries=1, progress=False, output="none")
    assert Fails.held == [2, 2] * len(outcomes)
    assert not Fails.cluster.reservations.held


def test_a_run_that_waits_can_be_stopped() -> None:
    cluster = Cluster(2)
    first, second = cluster.run(2), RunSlots()
    waits = threading.Thread(target=cluster.take, args=(second, 2, 60.0))
    waits.start()
    while second not in cluster.reservations.queue:
        time.sleep(0.001)
    second.stop_waiting()
    waits.join(5)
    assert not waits.is_alive()
    assert list(cluster.reservations.held) == [first]
    assert not cluster.reservations.queue


def test_growth_is_offered_for_free_slots_only() -> None:
    cluster = Cluster(4)
    first, second = cluster.run(2), cluster.run(2)
    job = SparkJob.__new__(SparkJob)
    job.__dict__.update(
        _cluster=SimpleNamespace(slots=lambda _: cluster.slots), _attempt=SimpleNamespace(slots=first, gang=None)
    )
    assert job.slots() == 2
    second.release()
    assert job.slots() == 4


def test_an_attempt_has_the_ranks_that_its_run_has_slots_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(4)
    first, _second = cluster.run(2), cluster.run(2)
    found = SimpleNamespace(ranks_for=lambda *_, **__: 4, slots=lambda _: cluster.slots)
    monkeypatch.setattr(on_cluster, "cluster_of", lambda _: found)
    recorder: Any = SimpleNamespace(note=lambda _: None)
    spark = SimpleNamespace(sparkContext=SimpleNamespace(master="yarn"), conf={})
    attempt = Attempt(print, (), {}, tr.Gang(ranks=(1, 4)), {}, None, spark, "1", recorder, 4, 1, slots=first)
    assert on_cluster.OnCluster(attempt)._attempt.ranks == 2
