"""An exception of a rank, wherever it is raised: its own type, message, traceback, rank and host, within 2 s."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from bounds import within
from tritium.errors import RankFailed, Stalled, TritiumWarning


def launch(fn: Callable[..., Any], run_dir: Path, **settings: Any) -> list[Any]:
    quiet: dict[str, Any] = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "retries": 0}
    return tr.launch(fn, run_dir=str(run_dir), **{**quiet, **settings})


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = run_dir.joinpath("events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def last_step() -> None:
    world = tr.world()
    world.barrier()
    if world.rank == 0:
        return
    raise ValueError(time.time())


def in_a_loaders_process() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise ValueError(time.time())

    tr.world().barrier()
    if tr.world().rank == 1:
        list(DataLoader(Rows(), batch_size=1, num_workers=1))
    tr.world().barrier()


def while_it_collates() -> None:
    from torch.utils.data import DataLoader

    def collate(rows: list[int]) -> list[int]:
        raise ValueError(time.time())

    tr.world().barrier()
    if tr.world().rank == 1:
        list(DataLoader([1, 2], batch_size=1, num_workers=1, collate_fn=collate))
    tr.world().barrier()


def in_a_pool() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work() -> None:
        raise ValueError(time.time())

    tr.world().barrier()
    if tr.world().rank == 1:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
    tr.world().barrier()


@pytest.mark.parametrize("train", [last_step, in_a_loaders_process, while_it_collates, in_a_pool])
def test_it_is_raised_on_the_driver(train: Callable[[], None], tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"raised ValueError: ") as caught:
        launch(train, tmp_path)
    over = time.time()
    error = caught.value
    assert (error.rank, error.host, type(error.__cause__)) == (1, socket.gethostname(), ValueError)
    assert "raise ValueError(time.time())" in error.traceback
    (moment,) = re.findall(r"\b\d{10}\.\d+", str(error.__cause__))
    within("rank raises", over - float(moment))


class TestInAThread:
    """It ends the thread and nothing else, as in any Python; but the driver hears of it at once."""

    def test_it_is_told_at_once_and_again_at_the_end(self, tmp_path: Path) -> None:
        def work() -> None:
            raise ValueError(time.time())

        def train() -> int:
            if tr.world().rank == 1:
                thread = threading.Thread(target=work, name="prefetch")
                thread.start()
                thread.join()
            return tr.world().rank

        with pytest.warns(TritiumWarning, match=r"its thread 'prefetch' raised ValueError: ") as caught:
            assert launch(train, tmp_path) == [0, 1]
        (told,) = events(tmp_path, "non_fatal_error")
        (note,) = events(tmp_path, "note")
        assert (told["rank"], told["host"], told["type"], told["late"]) == (
            1,
            socket.gethostname(),
            "ValueError",
            False,
        )
        assert note["text"].startswith(f"rank 1 on {told['host']} (pid {told['pid']}): its thread 'prefetch' raised")
        within("rank raises", datetime.fromisoformat(note["time"]).timestamp() - float(told["text"]))
        assert "raise ValueError(time.time())" in str(caught[0].message)
        assert "raise ValueError(time.time())" in (tmp_path / "logs" / "rank-1.log").read_text()

    def test_who_waits_for_the_thread_in_vain_is_named_with_it(self, tmp_path: Path) -> None:
        def train() -> None:
            import queue

            def work() -> None:
                raise ValueError("no such file")

            rows: queue.Queue[int] = queue.Queue()
            threading.Thread(target=work, name="prefetch", daemon=True).start()
            rows.get()

        with pytest.raises(
            Stalled, match=r"(?s)in train\(\).*Before that:\n  rank 0 on .*'prefetch' raised ValueError"
        ):
            launch(train, tmp_path, ranks=1, stall_timeout=1.0)

    def test_sys_exit_in_it_is_no_matter(self, tmp_path: Path) -> None:
        def train() -> int:
            thread = threading.Thread(target=sys.exit)
            thread.start()
            thread.join()
            return 7

        assert launch(train, tmp_path, ranks=1) == [7]


def fail() -> None:
    raise OSError("the disk is full")


class Owner:
    """The owner of a file, for example."""

    def __del__(self) -> None:
        fail()


class TestAfterItsFunctionHasReturned:
    """It can't change a result any more: none is lost, and the driver is told."""

    @pytest.mark.parametrize(
        ("leave", "told"),
        [
            (lambda: atexit.register(fail), r"an exit handler raised OSError: the disk is full"),
            (
                lambda: threading.Thread(target=lambda: (time.sleep(0.3), fail()), name="writer").start(),
                r"its thread 'writer' raised OSError: the disk is full",
            ),
            (lambda: atexit.register(os._exit, 3), r"left with exit code 3"),
            (lambda: atexit.register(os.kill, os.getpid(), signal.SIGSEGV), r"was killed by SIGSEGV"),
        ],
        ids=["exit handler", "thread", "os._exit", "crash"],
    )
    def test_it_is_told(self, leave: Callable[[], Any], told: str, tmp_path: Path) -> None:
        def train() -> int:
            if tr.world().rank == 1:
                leave()
            return tr.world().rank

        match = rf"Rank 1 on \S+ \(pid \d+\):? {told}, after every function had returned"
        with pytest.warns(TritiumWarning, match=match) as caught:
            assert launch(train, tmp_path) == [0, 1]
        assert ("in fail" in str(caught[0].message)) == ("OSError" in told)
        assert json.loads((tmp_path / "report.json").read_text())["ok"]

    def test_a_destructors_is_in_the_log(self, tmp_path: Path) -> None:
        def train() -> int:
            Owner()
            return 1

        assert launch(train, tmp_path, ranks=1) == [1]
        assert "the disk is full" in (tmp_path / "logs" / "rank-0.log").read_text()

    def test_what_cleans_up_at_the_end_does(self, tmp_path: Path) -> None:
        """An idle pool ends with its rank, and a temporary directory is removed, as in any Python."""

        def train() -> str:
            import builtins
            from concurrent.futures import ThreadPoolExecutor

            pool = ThreadPoolExecutor(2)
            pool.submit(int).result()
            folder = tempfile.TemporaryDirectory(dir=tmp_path)
            builtins.kept = pool, folder  # type: ignore[attr-defined]
            return folder.name

        (folder,) = launch(train, tmp_path / "run", ranks=1, stall_timeout=5)
        assert not Path(folder).exists()
