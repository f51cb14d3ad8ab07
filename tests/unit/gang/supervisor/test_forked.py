"""Ranks that are forked from one process: whose child they are, what they share, and what ends them (Linux)."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import tritium as tr
from clusters import wait
from tritium.accelerators import Accelerators
from tritium.errors import RankFailed, StartTimeout, WrongVersion
from tritium.gang.order import Order
from tritium.gang.supervisor import forked

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only"),
]


def launch(function: Any, ranks: int = 2, **settings: Any) -> Any:
    quiet: dict[str, Any] = {"on": "driver", "progress": False, "output": "none", "retries": 0}
    return tr.launch(function, ranks=ranks, **{**quiet, **settings})


def parents() -> tuple[int, int, str]:
    parent = psutil.Process().parent()
    assert parent is not None
    return parent.pid, os.getsid(0), " ".join(parent.cmdline())


def test_ranks_are_children_of_one_process_and_lead_sessions_of_their_own() -> None:
    (server, first, command), (same, second, _) = launch(parents, framework="torch")
    assert server == same != os.getpid()
    assert first != second
    assert "fork_server" in command


def test_what_ranks_need_of_tritium_is_imported_before_they_are_forked() -> None:
    def has_shard() -> bool:
        return "tritium.data.shard" in sys.modules

    rows = pa.table({"x": [1.0, 2.0]})
    assert launch(has_shard) == [False, False]
    assert launch(has_shard, data={"train": rows}) == [True, True]


def drawn_by_jax() -> tuple[int, float]:
    import jax

    return parents()[0], float(jax.random.uniform(jax.random.key(random.getrandbits(30))))


def drawn_by_tensorflow() -> tuple[int, float]:
    import tensorflow as tf

    return parents()[0], float(tf.random.uniform(()))


def drawn_by_keras() -> tuple[int, float]:
    import keras

    return parents()[0], float(keras.random.uniform(()))


@pytest.mark.parametrize("drawn", [drawn_by_jax, drawn_by_tensorflow, drawn_by_keras])
def test_frameworks_with_runtimes_of_their_own_are_forked_before_these_start(drawn: Any) -> None:
    framework = drawn.__name__.rpartition("_")[2]
    (server, first), (same, second) = launch(drawn, framework=framework, env={"KERAS_BACKEND": "jax"})
    assert server == same != os.getpid()
    assert first != second


def test_random_numbers_differ() -> None:
    def draw() -> tuple[float, float]:
        import numpy as np

        return random.random(), float(np.random.rand())

    first, second = launch(draw, framework="torch")
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_only_its_own_descriptors_are_open_in_a_rank(tmp_path: Path) -> None:
    def count() -> int:
        tr.world().barrier()
        return len(os.listdir("/proc/self/fd"))

    (alone,) = launch(count, 1)
    assert launch(count, 6) == [alone] * 6


def test_many_descriptors_do_not_fit_and_such_ranks_get_a_python_of_their_own() -> None:
    import pandas as pd

    wide = pd.DataFrame({f"c{number}": [1.0, 2.0] for number in range(forked._MOST_DESCRIPTORS + 1)})
    assert [parent for parent, _, _ in launch(parents, data={"train": wide})] == [os.getpid()] * 2


def test_another_users_process_that_has_the_name_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could take the rows, and the user's code."""
    monkeypatch.setattr(forked, "peer", lambda connection: (1, os.getuid() + 1))
    bound: list[socket.socket] = []
    reach, first = forked.reach, threading.Lock()

    def squatted(name: str) -> Any:
        with first:  # the threads of both ranks come here
            if not bound:
                bound.append(socket.socket(socket.AF_UNIX))
                bound[0].bind(name)
                bound[0].listen()
        return reach(name)

    monkeypatch.setattr(forked, "reach", squatted)
    try:
        assert [parent for parent, _, _ in launch(parents)] == [os.getpid()] * 2
        bound[0].setblocking(False)
        for _ in range(2):
            connection, _ = bound[0].accept()
            assert connection.recv(1) == b"", "nothing was sent"
            connection.close()
    finally:
        bound[0].close()


def test_a_framework_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    tmp_path.joinpath("lightgbm.py").write_text("raise ImportError('half of it is missing')")
    with pytest.raises(WrongVersion, match=r"lightgbm can't be imported on .*half of it is missing"):
        launch(parents, framework="lightgbm", env={"PYTHONPATH": str(tmp_path)})


def test_a_framework_that_crashes_at_its_import_is_named_with_its_signal(tmp_path: Path) -> None:
    tmp_path.joinpath("lightgbm.py").write_text("import os; os.abort()")
    with pytest.raises(RankFailed, match="SIGABRT") as caught:
        launch(parents, framework="lightgbm", env={"PYTHONPATH": str(tmp_path)})
    assert "lightgbm.py" in str(caught.value)


def test_a_framework_that_hangs_at_its_import_is_killed_with_the_launch(tmp_path: Path) -> None:
    tmp_path.joinpath("lightgbm.py").write_text(
        "import os, pathlib, signal\n"
        "pathlib.Path(os.environ['PLACE'], str(os.getpid())).touch()\n"
        "while True: signal.pause()\n"
    )
    tmp_path.joinpath("pids").mkdir()
    env = {"PYTHONPATH": str(tmp_path), "PLACE": str(tmp_path / "pids")}
    with pytest.raises(StartTimeout, match="importing lightgbm"):
        launch(parents, framework="lightgbm", env=env, start_timeout=3.0)
    (pid,) = (int(name) for name in os.listdir(tmp_path / "pids"))
    wait(lambda: not psutil.pid_exists(pid), "the server is gone", 10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_server_that_dies_takes_its_ranks_along_and_they_are_started_again(number: int, tmp_path: Path) -> None:
    def stay() -> int:
        world = tr.world()
        world.barrier()
        if tmp_path.joinpath("done").exists():
            return world.size
        if world.rank == 0:
            tmp_path.joinpath(str(os.getppid())).touch()
        while world.gather(True):
            pass
        return 0

    def kill() -> None:
        wait(lambda: any(tmp_path.iterdir()), "the ranks run", 30)
        (server,) = (int(file.name) for file in tmp_path.iterdir())
        tmp_path.joinpath("done").touch()
        os.kill(server, number)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        assert launch(stay, retries=1) == [2, 2]
    finally:
        thread.join()


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    def start() -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "600"])
        tmp_path.joinpath(str(child.pid)).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed, match="SIGKILL"):
        launch(start, 1)
    (pid,) = (int(file.name) for file in tmp_path.iterdir())
    wait(lambda: not psutil.pid_exists(pid), "the rank's child is gone", 10)


def test_a_server_that_is_stopped_does_not_keep_the_launch(tmp_path: Path) -> None:
    def stop() -> None:
        os.kill(os.getppid(), signal.SIGSTOP)
        tmp_path.joinpath(str(os.getppid())).touch()
        raise ValueError("mine")

    try:
        with pytest.raises(RankFailed, match="mine"):
            launch(stop, 1)
    finally:
        (server,) = (int(file.name) for file in tmp_path.iterdir())
        os.kill(server, signal.SIGCONT)
    wait(lambda: not psutil.pid_exists(server), "the server is gone", 10)


def test_where_no_process_can_be_forked_the_error_says_so(tmp_path: Path) -> None:
    tmp_path.joinpath("lightgbm.py").write_text(
        "import os\ndef fork():\n    raise BlockingIOError(11, 'no more processes')\nos.fork = fork\n"
    )
    with pytest.raises(RankFailed, match="left with exit code 1") as caught:
        launch(parents, 1, framework="lightgbm", env={"PYTHONPATH": str(tmp_path)})
    assert "this rank can't be forked: [Errno 11] no more processes" in str(caught.value)


def test_with_gpus_a_rank_has_a_python_of_its_own() -> None:
    order = Order(launch="L", run_id="r", size=1, address=("", 0), secret=b"", job=b"", env={})
    assert forked._may_fork(order, [3])
    assert not forked._may_fork(replace(order, accelerators=Accelerators(amount=1)), [3])
