"""A gang that was lost is restarted; an error of the function's own is raised at once."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from bounds import within
from tritium.errors import BadSetting, RankFailed


def launch(fn: Callable[..., Any], run_dir: Path, **settings: Any) -> list[Any]:
    quiet: dict[str, Any] = {"ranks": 2, "on": "driver", "progress": False, "output": "none"}
    return tr.launch(fn, run_dir=str(run_dir), **{**quiet, **settings})


def first_time(folder: Path, what: str = "") -> bool:
    """Return, in a rank, whether this is the first call."""
    try:
        os.close(os.open(folder / f"done{what}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text()))


DEATHS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
    "os._exit": (lambda: os._exit(3), "left with exit code 3 before its function returned"),
    "sys.exit": (lambda: sys.exit(), r"left: it called sys.exit(None) instead of returning"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_that_is_taken_away_is_started_again(death: str, tmp_path: Path) -> None:
    die, words = DEATHS[death]

    def train() -> list[int]:
        world = tr.world()
        world.barrier()
        if world.rank == 1 and first_time(tmp_path):
            die()
        return world.gather(world.rank)

    assert launch(train, tmp_path) == [[0, 1], [0, 1]]
    (retry,) = report(tmp_path)["retries"]
    assert (retry["number"], retry["of"], retry["start"]) == (1, 2, None)
    assert words in retry["reason"]
    assert report(tmp_path)["failure"] is None
    first, second = report(tmp_path)["notes"]
    assert f"{words}" in first
    assert first.endswith("Retry 1 of 2, from the beginning: no checkpoint yet")
    assert second == "starting again with 2 ranks"


@pytest.mark.parametrize(("death", "code"), [*((name, None) for name in DEATHS), ("os._exit", 0), ("sys.exit", 0)])
def test_it_is_known_at_once(death: str, code: int | None, tmp_path: Path) -> None:
    die, words = DEATHS[death]
    leave = os._exit if death == "os._exit" else sys.exit

    def train() -> None:
        world = tr.world()
        world.barrier()
        if world.rank == 1:
            (tmp_path / "moment").write_text(str(time.time()))
            die() if code is None else leave(code)
        world.barrier()

    with pytest.raises(RankFailed) as caught:
        launch(train, tmp_path, retries=0)
    within("rank killed or left", time.time() - float((tmp_path / "moment").read_text()))
    assert caught.value.rank == 1
    assert (words.split("(")[0] if code is None else "left") in str(caught.value)


def test_rows_are_there_again_after_a_loss(tmp_path: Path) -> None:
    def train() -> list[float]:
        taken = []
        (epoch,) = tr.world().shard("train").epochs(1, batch_size=4)
        for batch in epoch:
            taken += batch["x"][: batch.rows].tolist()
            if batch.step == 2 and tr.world().rank == 0 and first_time(tmp_path):
                os.kill(os.getpid(), signal.SIGKILL)
        return taken

    frame = pd.DataFrame({"x": np.arange(30.0)})
    one, other = launch(train, tmp_path, data={"train": frame})
    assert sorted(one + other) == list(np.arange(30.0))


def test_an_exception_of_the_function_is_raised_at_once(tmp_path: Path) -> None:
    def train() -> None:
        (tmp_path / f"{tr.world().rank}-{time.monotonic_ns()}.tried").touch()
        tr.world().barrier()
        raise ValueError("mine")

    with pytest.raises(RankFailed, match="mine") as caught:
        launch(train, tmp_path)
    assert not caught.value.lost
    assert len(list(tmp_path.glob("*.tried"))) == 2


def parse() -> None:
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--lr", required=True)
    parser.parse_args([])


OWN_EXITS = {
    "argparse": (parse, 2, "usage: train.py [-h] --lr LR\ntrain.py: error: the following arguments are required: --lr"),
    "text": (lambda: sys.exit("there is no data"), 1, "there is no data"),
    "code": (lambda: (print("done for"), sys.exit(3)), 3, "done for"),
}


@pytest.mark.parametrize("kind", OWN_EXITS)
def test_an_exit_of_its_own_is_raised_at_once_with_what_it_has_written(kind: str, tmp_path: Path) -> None:
    leave, code, words = OWN_EXITS[kind]

    def train() -> None:
        (tmp_path / f"{tr.world().rank}-{time.monotonic_ns()}.tried").touch()
        if tr.world().rank == 1:
            leave()
        tr.world().barrier()

    with pytest.raises(RankFailed, match=r"^Rank 1 on \S+ \(pid \d+\) left: it called sys\.exit\(") as caught:
        launch(train, tmp_path)
    assert (caught.value.exit_code, caught.value.lost) == (code, False)
    assert str(caught.value).partition("lines of output:\n")[2].startswith(words)
    assert str(caught.value).index(words) < str(caught.value).index("Traceback")
    assert len(list(tmp_path.glob("*.tried"))) == 2


@pytest.mark.parametrize("kind", ["script", "program"])
def test_a_script_that_exits_by_itself_is_not_run_again(kind: str, tmp_path: Path) -> None:
    program = tmp_path / ("train.py" if kind == "script" else "train.sh")
    line = "import sys; sys.exit('no data')" if kind == "script" else "#!/bin/sh\necho no data >&2; exit 4"
    program.write_text(line)
    program.chmod(0o755)
    with pytest.raises(RankFailed, match=r"left: it called sys\.exit\(") as caught:
        launch(program, tmp_path)
    assert (caught.value.exit_code, caught.value.lost) == ({"script": 1, "program": 4}[kind], False)
    assert "lines of output:\nno data\n" in str(caught.value)


def test_an_exit_for_a_signal_is_a_loss(tmp_path: Path) -> None:
    def train() -> list[int]:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        if tr.world().rank == 1 and first_time(tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)  # as a cluster manager does
        return list(tr.world().gather(tr.world().rank))

    assert launch(train, tmp_path) == [[0, 1], [0, 1]]


def test_after_the_last_retry_the_error_tells_every_attempt(tmp_path: Path) -> None:
    def train() -> None:
        os._exit(4 + tr.world().rank)

    with pytest.raises(RankFailed) as caught:
        launch(train, tmp_path, ranks=1, retries=1)
    first, second, over = str(caught.value).split("\n\n")[-2].splitlines()
    assert first.startswith("Attempt 1: rank 0 on ")
    assert second.startswith("Attempt 2: rank 0 on ")
    assert over == "Given up after 2 attempts (retries=1)."


@pytest.mark.parametrize(
    ("groups", "so"),
    [
        ("/no such place", r"so it is probably out of memory\. Give it more"),
        ("/sys/fs/cgroup", r"and not for want of memory\. Find out who"),
    ],
    ids=["its group is not known", "figures speak against a lack of memory"],
)
def test_a_rank_that_is_killed_again_and_again_is_given_up(
    groups: str, so: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        (tmp_path / f"{time.monotonic_ns()}.tried").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("tritium.gang.supervisor.memory._CGROUPS", Path(groups))

    with pytest.raises(RankFailed) as caught:
        launch(train, tmp_path, ranks=1, retries=9)
    assert len(list(tmp_path.glob("*.tried"))) == 3
    assert caught.value.signal == "SIGKILL"
    if Path(groups).exists() and "oom_kills" not in caught.value.memory:
        pytest.skip("this host does not show its memory groups")
    assert re.search(rf"rank 0 was killed by SIGKILL 3 times, {so}", str(caught.value)), str(caught.value)


def test_as_many_ranks_as_this_machine_has_gpus_or_the_most(tmp_path: Path) -> None:
    assert launch(lambda: tr.world().size, tmp_path, ranks=(1, 3)) == [3, 3, 3]


@pytest.mark.parametrize("ranks", [(0, 2), (3, 2), (1, 2, 3), (1, "2"), (True, 2)])
def test_a_range_of_ranks_that_is_none(ranks: Any) -> None:
    with pytest.raises(BadSetting, match=r"must be a whole number, or \(least, most\) with 1 <= least <= most"):
        tr.Gang(ranks=ranks)
