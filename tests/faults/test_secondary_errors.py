"""The errors of other ranks never hide the cause of a rank's death; and with retries the run succeeds."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import tritium as tr
from clusters import wait
from machines import Machine, order_for
from ranks import reduce_for_ever
from tritium.errors import RankFailed
from tritium.events import Event
from tritium.gang.coordinator.coordinator import Coordinator

SEEDS = [30_000 + number for number in range(int(os.environ.get("TRITIUM_FAULT_ROUNDS", "1")))]


def launch(fn: Callable[..., Any], run_dir: Path, *args: Any, **settings: Any) -> list[Any]:
    quiet: dict[str, Any] = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "framework": "torch"}
    return tr.launch(fn, args=args, run_dir=str(run_dir), **{**quiet, **settings})


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = run_dir.joinpath("events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise KeyError("mine")


def train(moment: str, seconds: float, die: Callable[[], None], who: int, folder: Path) -> int:
    """Let rank `who` die the first time: at this moment, after so many seconds where others wait for it meanwhile."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    world = tr.world()
    mine = world.rank == who and not folder.joinpath("died").exists()
    world.barrier()  # all have looked
    if mine:
        folder.joinpath("died").touch()
    if mine and moment == "before init_process_group":
        die()
    if mine and moment == "inside init_process_group":
        threading.Timer(seconds, die).start() if die is kill else die()
        time.sleep(0 if who == 0 else seconds)  # rank 0 serves the store at which the others wait
    dist.init_process_group("gloo")
    if mine and moment == "inside init_process_group":
        time.sleep(60)  # its end comes just after it, then
    if mine and moment == "after init_process_group":
        die()
    if moment == "inside all_reduce" and not folder.joinpath("again").exists():
        if mine and die is kill:
            threading.Timer(seconds, die).start()
        ones, end = torch.ones(1 << 22), time.monotonic() + (seconds if mine and die is fail else 60)
        while time.monotonic() < end:
            dist.all_reduce(ones)
        die()
    layers = [torch.nn.Linear(128, 128) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    if mine and moment == "inside backward":
        layers[2].weight.register_hook(lambda _: die())
    for _ in range(3):
        model(torch.randn(8, 128)).sum().backward()
    dist.destroy_process_group()
    return world.rank


def only_once(moment: str, seconds: float, die: Callable[[], None], who: int, folder: Path) -> int:
    """Do as `train`; the second time nothing dies."""
    if folder.joinpath("died").exists():
        folder.joinpath("again").touch()
    tr.world().barrier()
    return train(moment, seconds, die, who, folder)


MOMENTS = [f"{when} init_process_group" for when in ("before", "inside", "after")]
MOMENTS += ["inside all_reduce", "inside backward"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_is_killed_is_named_and_the_run_ends_well(moment: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"{moment} {seed}")
    ranks = chance.choice((2, 3)) if seed != SEEDS[0] else 2
    who, seconds = chance.randrange(ranks), chance.uniform(0.05, 0.6)
    assert launch(only_once, tmp_path, moment, seconds, kill, who, tmp_path, ranks=ranks) == list(range(ranks))
    (retry,) = json.loads((tmp_path / "report.json").read_text())["retries"]
    assert retry["reason"].startswith(f"rank {who} on "), retry
    assert "was killed by SIGKILL" in retry["reason"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", ["inside all_reduce", "inside backward"])
def test_a_rank_that_raises_is_named_at_once(moment: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"{moment} {seed}")
    ranks = chance.choice((2, 3)) if seed != SEEDS[0] else 3
    who, seconds = chance.randrange(ranks), chance.uniform(0.05, 0.6)
    with pytest.raises(RankFailed, match=r"raised KeyError: 'mine'") as caught:
        launch(train, tmp_path, moment, seconds, fail, who, tmp_path, ranks=ranks)
    assert (caught.value.rank, type(caught.value.__cause__)) == (who, KeyError)
    assert not events(tmp_path, "retry")


@pytest.mark.parametrize("answer", ["another exception", "sys.exit", "os._exit"])
def test_what_a_function_makes_of_an_echo_is_one_too(answer: str, tmp_path: Path) -> None:
    def listen() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if tr.world().rank == 1:
            threading.Timer(0.1, kill).start()
        try:
            while True:
                dist.all_reduce(torch.ones(1 << 16))
        except RuntimeError as error:
            if answer == "another exception":
                raise ValueError("the step failed") from error
            sys.exit(4) if answer == "sys.exit" else os._exit(4)

    with pytest.raises(RankFailed, match="was killed by SIGKILL") as caught:
        launch(listen, tmp_path, retries=0)
    assert caught.value.rank == 1


def test_a_service_of_the_users_that_refuses_a_connection_is_the_users_own_error(tmp_path: Path) -> None:
    def connect() -> None:
        import socket

        with socket.socket() as held:  # bound, and never listening
            held.bind(("127.0.0.1", 0))
            socket.create_connection(held.getsockname())

    with pytest.raises(RankFailed, match="raised ConnectionRefusedError") as caught:
        launch(connect, tmp_path, framework=None)
    assert not caught.value.lost
    assert not events(tmp_path, "retry")


class Silent:
    """An observer that ignores the coordinator's events."""

    def event(self, event: Event) -> None: ...
    def output(self, rank: int, text: str) -> None: ...
    def store(self, piece: Any) -> None: ...
    def spans(self, rank: int, line: bytes) -> None: ...


def test_a_supervisor_that_dies_with_its_rank_is_waited_for(tmp_path: Path) -> None:
    """An executor that is killed: the other rank's collective fails within milliseconds, and does not know why."""
    coordinator = Coordinator(2, launch="L1", observer=Silent()).start()
    order = order_for(coordinator, reduce_for_ever, str(tmp_path))
    machines: list[Machine] = []
    try:
        machines += [Machine(order, partition) for partition in range(2)]
        wait(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "both ranks run", 60)
        psutil.Process(machines[1].process.pid).kill()  # the kernel ends its rank
        with coordinator.changed:
            coordinator.changed.wait_for(lambda: coordinator.failure is not None, 15)
        assert coordinator.failure is not None
        assert (coordinator.failure.how, coordinator.failure.rank) == ("lost", 1)
    finally:
        for machine in machines:
            machine.close()
        coordinator.close()
