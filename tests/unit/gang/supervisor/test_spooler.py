"""Rows on their way to a rank: what is read before the rank is ready, and when."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from clusters import wait
from tritium.data.spool import Spool
from tritium.data.tables import Tables
from tritium.errors import WireError
from tritium.gang.order import Order
from tritium.gang.supervisor import spooler as module
from tritium.gang.supervisor.ending import GangEnded
from tritium.gang.supervisor.spooler import AHEAD, Spooler
from tritium.wire import Channel

TABLES = Tables({"train": pd.DataFrame({"x": np.arange(10 * AHEAD, dtype=np.float32)})}, 1)


class Told:
    """A recorder of messages."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def send(self, kind: str, blob: bytes = b"", /, **fields: Any) -> None:
        self.kinds.append(kind)


class Taking:
    """A spooler in a thread of its own."""

    def __init__(self, *, streams: bool, rank: Any = None) -> None:
        self.order = Order(
            launch="L", run_id="L", size=1, address=("", 0), secret=b"", job=b"", env={},
            plan=TABLES.plan, streams=streams, prepared={"train": "stream" if streams else "full"},
        )  # fmt: skip
        self.spools = {name: Spool(fields) for name, fields in TABLES.plan.items()}
        self.read = 0
        self.end: Exception | None = None
        self.coordinator = Told()
        stand_in: Any = self.coordinator
        self.spooler = Spooler(self.order, self.spools, stand_in, rank or stand_in, self.check)
        self.raised: list[BaseException] = []
        self.thread = threading.Thread(target=self.run)

    def check(self) -> None:
        if self.end is not None:
            raise self.end

    def batches(self) -> Iterator[pa.RecordBatch]:
        for batch in TABLES.batches(0):
            self.read += batch.num_rows
            yield batch

    def run(self) -> None:
        try:
            self.spooler.run(self.batches(), lambda: True)
        except (GangEnded, WireError) as error:
            self.raised.append(error)

    def __enter__(self) -> Taking:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.spooler.ready.set()
        self.thread.join()
        for spool in self.spools.values():
            spool.close()


@pytest.fixture(params=[True, False], ids=["busy", "idle"])
def busy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(module, "busy", lambda: request.param)
    return bool(request.param)


def test_on_a_busy_host_rows_that_no_first_step_needs_wait_until_the_rank_is_ready(busy: bool) -> None:
    with Taking(streams=True) as taking:
        if busy:
            wait(lambda: taking.read > AHEAD, "the first rows are read", 20)
            taking.thread.join(1.0)
            assert taking.thread.is_alive(), "all rows were read while the rank still imported its framework"
            assert taking.read < 3 * AHEAD
            assert "receipt" not in taking.coordinator.kinds
            taking.spooler.ready.set()
        taking.thread.join(20)
        assert taking.spooler.rows == {"train": 10 * AHEAD}
        assert taking.coordinator.kinds[-1] == "receipt"


def test_where_the_first_step_needs_all_rows_nothing_waits(busy: bool) -> None:
    with Taking(streams=False) as taking:
        taking.thread.join(20)
        assert taking.spooler.rows == {"train": 10 * AHEAD}


def test_a_gang_that_ends_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "busy", lambda: True)
    with Taking(streams=True) as taking:
        wait(lambda: taking.read > AHEAD, "the first rows are read", 20)
        taking.end = GangEnded("ended")
        taking.thread.join(5)
        assert not taking.thread.is_alive()
        assert taking.raised == [taking.end]


@pytest.mark.parametrize("streams", [True, False])
def test_that_a_rank_was_killed_is_not_told_as_an_error_of_its_rows(streams: bool) -> None:
    """Who waits for the process says how it ended: else a killed rank is an error of the connection, never retried."""
    ours, theirs = socket.socketpair()
    theirs.close()
    rank = Channel(ours)
    with Taking(streams=streams, rank=rank) as taking:
        taking.spooler.ready.set()
        taking.thread.join(20)
        taking.spooler.announce("train", {})
        assert taking.raised == []
        assert taking.coordinator.kinds[-1] == "receipt"
    rank.close()


def test_a_host_is_busy_when_more_threads_want_to_run_than_it_has_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = tmp_path / "loadavg"
    monkeypatch.setattr(module, "LOAD", str(load))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    for running, expected in ((3, False), (4, True)):
        load.write_text(f"0.52 0.58 0.59 {running}/467 12345\n")
        assert module.busy() is expected
    load.unlink()
    assert module.busy() is False, "where nothing is told, nothing waits"
