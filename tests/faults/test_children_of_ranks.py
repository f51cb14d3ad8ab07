"""What a rank's own child processes do is not taken for the rank, and they keep no launch from ending."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tritium as tr
from bounds import within
from clusters import wait
from tritium.errors import RankFailed


def launch(fn: Callable[..., Any], **settings: Any) -> list[Any]:
    return tr.launch(fn, **{"ranks": 2, "on": "driver", "progress": False, "output": "none", "retries": 0, **settings})


def raises() -> None:
    raise ValueError("in the child")


LEAVES: dict[str, tuple[Callable[[], Any], int, str]] = {
    "sys.exit(0)": (lambda: sys.exit(0), 0, ""),
    "sys.exit(3)": (lambda: sys.exit(3), 3, ""),
    "a text": (lambda: sys.exit("no data"), 1, "no data\n"),
    "an exception": (raises, 1, "ValueError: in the child\n"),
    "a return": (lambda: "the child", 0, ""),
}


@pytest.mark.parametrize("way", LEAVES)
def test_a_forked_child_that_leaves_is_not_the_rank(way: str, tmp_path: Path) -> None:
    leave, code, words = LEAVES[way]

    def train() -> Any:
        child = os.fork() if tr.world().rank == 1 else None
        if child == 0:
            print("from the child")
            return leave()
        ended = None if child is None else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return tr.world().gather(ended)  # in which the rank's connection works, and is the rank's alone

    assert launch(train, run_dir=str(tmp_path)) == [[None, code], [None, code]]
    log = (tmp_path / "logs/rank-1.log").read_text()
    assert "from the child\n" in log
    assert words in log
    assert "tritium/gang" not in log, "the traceback is the user's"


def test_a_child_does_not_disconnect_its_rank() -> None:
    """The memory in which DDP averages is left, with its connections, when the function returns: in the rank alone."""

    def train() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        net(torch.ones(4, 2)).sum().backward()
        if (child := os.fork()) == 0:
            return 0.0
        os.waitpid(child, 0)
        net(torch.ones(4, 2)).sum().backward()
        return float(net.module.bias.grad)

    assert launch(train, framework="torch") == [8.0, 8.0]


@pytest.fixture
def survivor(tmp_path: Path) -> Iterator[Path]:
    """Give the file in which a rank's child that outlives it writes its pid, and end that child."""
    path = tmp_path / "survivor"
    yield path
    child = psutil.Process(int(path.read_text()))
    child.kill()
    wait(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child has ended", 10)


def outlive(path: Path, how: str) -> None:
    """Start a child that leaves the rank's process group, and keeps its output open; or also what else a fork keeps."""
    if how == "Popen":
        with open(path, "w") as file:
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            file.write(str(child.pid))
            child.returncode = 0  # it is not waited for
        return
    if os.fork() == 0:
        os.setsid()
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        while True:
            print("the child says", flush=True)
            time.sleep(0.1)
    wait(path.exists, "the child has started", 10)


@pytest.mark.parametrize("how", ["Popen", "fork"])
def test_a_child_with_the_output_of_a_killed_rank_keeps_no_launch(how: str, survivor: Path) -> None:
    moment = survivor.with_name("moment")

    def train() -> None:
        tr.world().barrier()
        if tr.world().rank == 1:
            outlive(survivor, how)
            print("the last words", end="", flush=True)
            moment.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        tr.world().barrier()

    with pytest.raises(RankFailed, match="was killed by SIGKILL") as caught:
        launch(train)
    within("rank killed or left", time.time() - float(moment.read_text()))
    assert any("the last words" in line for line in caught.value.log)


@pytest.mark.parametrize("how", ["Popen", "fork"])
def test_a_child_with_the_output_of_a_rank_that_has_returned_keeps_no_launch(how: str, survivor: Path) -> None:
    moment = survivor.with_name("moment")

    def train() -> int:
        if tr.world().rank == 1:
            outlive(survivor, how)
            moment.write_text(str(time.time()))
        tr.world().barrier()
        return tr.world().rank

    assert launch(train) == [0, 1]
    within("rank killed or left", time.time() - float(moment.read_text()))
