"""A coordinator on an executor: what is returned with the results, and what does not fit there."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import tritium as tr
from clusters import free_port
from tritium import ship
from tritium.errors import StoreFailed, TritiumError
from tritium.events import Event, Note
from tritium.gang.coordinator import deferred_log as module
from tritium.gang.coordinator.on_executor import failure_in, newest_checkpoint, replay, result_limit, run
from tritium.gang.driver.certificate import new_certificate
from tritium.gang.failure import Failure
from tritium.gang.order import Order
from tritium.gang.supervisor.results import results_of
from tritium.gang.supervisor.supervisor import Supervisor
from tritium.observe.stored import Piece
from tritium.tls import Certificate


class Context:
    """The part of Spark's BarrierTaskContext that is used, for threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._words: list[str] = []

    def getTaskInfos(self) -> list[Any]:
        return [SimpleNamespace(address="127.0.0.1:1")]

    def allGather(self, word: str) -> list[str]:
        self._words.append(word)  # in any order; the one that has the coordinator's port is that of task 0
        self._barrier.wait(30)
        return sorted(self._words, key=lambda word: json.loads(word)["address"][1], reverse=True)


class Far:
    """Two ranks under a coordinator without a driver."""

    def __init__(self, function: Callable[[], Any], run_dir: Path, **facts: Any) -> None:
        job = ship.pickle((function, (), {}, {}, False))
        self.order = Order(
            launch="L", run_id="the-run", size=2, address=("127.0.0.1", free_port()), secret=os.urandom(32), job=job,
            env={}, run_dir=str(run_dir), **facts,
        )  # fmt: skip
        self.batches: list[pa.RecordBatch] = []
        self.errors: list[BaseException] = []
        self.context = Context(2)
        threads = [threading.Thread(target=self.task, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def task(self, number: int) -> None:
        supervisor = Supervisor(self.order, partition=number, attempt=0, gpus=(), cpus=1)
        try:
            batches = list(run(supervisor, self.context, iter(()), lambda: True))
            self.batches += batches
        except TritiumError as error:
            self.errors.append(error)

    def bytes(self) -> int:
        return sum(batch.nbytes for batch in self.batches)


class Observer:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self.files: dict[str, bytes] = {}
        self.traced: list[tuple[int, bytes]] = []

    def event(self, event: Event) -> None:
        self.events.append((event.kind, event.fields()))

    def spans(self, rank: int, line: bytes) -> None:
        self.traced.append((rank, line))

    def note(self, text: str) -> None:
        self.event(Note(text=text))

    def output(self, rank: int, text: str) -> None:
        self.text += text

    def store(self, piece: Piece) -> None:
        self.files[piece.name] = self.files.get(piece.name, b"") + piece.body

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]


def replayed(far: Far) -> Observer:
    observer = Observer()
    replay(far.batches, observer)
    return observer


@pytest.mark.parametrize("certificate", [None, new_certificate()], ids=["plain", "TLS"])
def test_what_the_ranks_said_comes_back_in_its_order_and_nothing_is_unpickled(
    certificate: Certificate | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> int:
        world = tr.world()
        for number in range(3):
            world.log(step=number, loss=float("nan"))
            world.barrier()
        if world.rank == 0:
            print("größer")
            world.store("a/file", [b"x" * (5 << 20), b"y"])
        return world.rank

    far = Far(train, tmp_path / "elsewhere", certificate=certificate)
    assert results_of(far.batches, 2) == [0, 1]

    def refuse(*_: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    observer = replayed(far)
    assert [event["step"] for event in observer.of("log") if event["rank"] == 1] == [0, 1, 2]
    assert observer.text == "größer\n"
    assert observer.files == {"a/file": b"x" * (5 << 20) + b"y"}
    kinds = [kind for kind, _ in observer.events]
    assert kinds.index("formed") < kinds.index("log") < kinds.index("rank_ended")


def test_spans_of_steps_come_back(tmp_path: Path) -> None:
    log, observer = module.DeferredLog(str(tmp_path), "r", 0), Observer()
    log.spans(1, b"{}\n")
    with log.written(0) as file:
        file.seek(0)
        module.tell([file.read()], observer)
    log.close()
    assert observer.traced == [(1, b"{}\n")]


def test_a_file_goes_to_a_run_directory_that_the_executor_reaches(tmp_path: Path) -> None:
    tmp_path.joinpath("run.json").write_text(json.dumps({"run": "the-run"}))

    def train() -> None:
        if tr.world().rank == 0:
            tr.world().store("weights.bin", [bytes(1 << 20)] * 8)

    far = Far(train, tmp_path, result_limit=1 << 20)
    assert (far.errors, far.bytes() < 1 << 20) == ([], True)
    assert tmp_path.joinpath("weights.bin").stat().st_size == 8 << 20
    observer = replayed(far)
    assert (observer.files, observer.of("stored")) == ({}, [{"name": "weights.bin"}])


def test_of_much_output_the_beginning_and_the_end_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_BYTES", 100_000)

    def train() -> None:
        if tr.world().rank == 0:
            for number in range(20_000):
                print(f"line {number} " + "x" * 50)

    far = Far(train, tmp_path / "elsewhere")
    observer = replayed(far)
    lines = [line for line in observer.text.splitlines() if line.startswith("line ")]
    assert lines[0].startswith("line 0 ")
    assert lines[-1].startswith("line 19999 ")
    assert far.bytes() < 700_000
    assert "events and pieces of output of this run were left out" in observer.of("note")[-1]["text"]
    assert len(observer.of("rank_ended")) == 2


def test_logs_give_way_to_results(tmp_path: Path) -> None:
    def train() -> bytes:
        print("x" * 3_000_000)
        return bytes(4_000_000)

    far = Far(train, tmp_path / "elsewhere", result_limit=10_000_000)
    assert far.bytes() < 10_000_000
    assert [len(result) for result in results_of(far.batches, 2)] == [4_000_000] * 2
    observer = replayed(far)
    assert observer.text == ""
    assert "were left out" in observer.of("note")[-1]["text"]


def test_a_file_that_spark_would_not_take_is_told_with_the_setting(tmp_path: Path) -> None:
    def train() -> None:
        if tr.world().rank == 1:
            tr.world().store("weights.bin", [bytes(1 << 20)] * 8)
        tr.world().barrier()

    far = Far(train, tmp_path / "elsewhere", result_limit=5 << 20)
    failure = next(found for found in map(failure_in, map(str, far.errors)) if found)
    assert isinstance(failure, Failure)
    error = failure.error()
    assert isinstance(error, StoreFailed)
    assert not failure.is_loss
    assert "4,718,592, which is what spark.driver.maxResultSize lets through. Raise that setting" in str(error)


def test_that_a_file_would_not_be_taken_is_known_before_a_training(tmp_path: Path) -> None:
    def train() -> None:
        tr.world().expect_file("weights.safetensors", 4 << 20)
        tr.world().expect_file("weights.safetensors", 8 << 20)

    far = Far(train, tmp_path / "elsewhere", result_limit=5 << 20)
    failure = next(found for found in map(failure_in, map(str, far.errors)) if found)
    assert failure.text.startswith("weights.safetensors of 8,388,608 bytes could not be stored at the end: executors")
    far = Far(train, tmp_path / "elsewhere")  # spark.driver.maxResultSize=0
    assert far.errors == []
    (tmp_path / "run.json").write_text(json.dumps({"run": "the-run"}))
    assert Far(train, tmp_path, result_limit=5 << 20).errors == []


@pytest.mark.parametrize(
    ("text", "size"), [("1g", 1 << 30), ("0", 0), ("512m", 512 << 20), ("1048576", 1 << 20), ("10 parsecs", 0)]
)
def test_sparks_limit_is_read_as_spark_writes_it(text: str, size: int) -> None:
    session = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: text))
    assert result_limit(session) == size


def test_a_run_directory_that_can_not_be_listed_has_no_newest_checkpoint(tmp_path: Path) -> None:
    tmp_path.joinpath("file").touch()
    assert newest_checkpoint(f"{tmp_path}/file") is None
    assert newest_checkpoint(f"{tmp_path}/nowhere") is None
