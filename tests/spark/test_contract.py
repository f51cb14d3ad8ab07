"""The contract of a launch on local, local-cluster, standalone and Spark Connect.

`make managers` runs it on YARN and Kubernetes.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import tritium as tr
from bounds import within
from tritium.errors import RankFailed

ROWS = 1000


def launch(cluster: Any, fn: Callable[[], Any], **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "progress": False, "output": "none", "start_timeout": 120, "retries": 0}
    return tr.launch(fn, spark=cluster.spark, **{**quiet, **settings})


def values(name: str, column: str = "x") -> list[float]:
    """Return, in a rank, every value of a column in one epoch."""
    (epoch,) = tr.world().shard(name).epochs(1, batch_size=64)
    return [float(x) for batch in epoch for x in batch[column][: batch.rows]]


def in_pods(cluster: Any) -> bool:
    """Tell whether each executor is a host of its own, with its own process ids."""
    return bool(cluster.kind.startswith("kubernetes"))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_results_come_in_rank_order(cluster: Any) -> None:
    offset = 10
    assert launch(cluster, lambda: (tr.world().rank + offset, tr.world().size)) == [(10, 2), (11, 2)]


def test_none_is_a_result(cluster: Any) -> None:
    assert launch(cluster, lambda: None) == [None, None]


def test_a_large_result_comes_whole(cluster: Any) -> None:
    size = 3 << 20

    def train() -> np.ndarray:
        return np.random.default_rng(tr.world().rank).random(size)

    for rank, array in enumerate(launch(cluster, train)):
        assert np.array_equal(array, np.random.default_rng(rank).random(size))


def test_ranks_know_each_other_and_run_in_processes_of_their_own(cluster: Any) -> None:
    def train() -> tuple[Any, ...]:
        import os

        world = tr.world()
        return world.peers, os.getpid(), os.environ["RANK"], os.environ["MASTER_PORT"], os.environ["MASTER_ADDR"]

    (peers, first, zero, port, address), (same, second, one, same_port, _) = launch(cluster, train)
    assert peers == same
    assert [(p.rank, p.pid, p.device) for p in peers] == [(0, first, "cpu"), (1, second, "cpu")]
    assert [p.local_rank for p in peers] == [0, int(not in_pods(cluster))]  # A pod is a host.
    assert (zero, one, port, address) == ("0", "1", same_port, peers[0].address)
    assert os.getpid() not in (first, second)


@pytest.mark.parametrize("tls", [None, True])
def test_gather_and_barrier(tls: bool | None, cluster: Any) -> None:
    def train() -> list[Any]:
        world = tr.world()
        for _ in range(100):
            world.barrier()
        return [world.gather({"rank": world.rank}), world.gather(None)]

    assert launch(cluster, train, tls=tls) == [[[{"rank": 0}, {"rank": 1}], [None, None]]] * 2


def test_every_row_of_a_dataframe_comes_exactly_once(cluster: Any) -> None:
    frame = cluster.spark.range(0, ROWS, 1, 5).selectExpr("cast(id as double) as x")
    shards = launch(cluster, lambda: values("train"), data={"train": frame})
    assert sorted(shards[0] + shards[1]) == list(map(float, range(ROWS)))
    assert abs(len(shards[0]) - len(shards[1])) <= 5  # equal to within the number of partitions


def test_several_dataframes_travel_together(cluster: Any) -> None:
    train = cluster.spark.range(0, 300, 1, 3).selectExpr("cast(id as double) as x")
    validation = cluster.spark.range(0, 40, 1, 2).selectExpr("cast(id as float) as y", "id % 3 as label")

    def ranks() -> tuple[list[float], list[float]]:
        return values("train"), values("validation", "y")

    shards = launch(cluster, ranks, data={"train": train, "validation": tr.Data(validation)})
    assert sorted(shards[0][0] + shards[1][0]) == list(map(float, range(300)))
    assert sorted(shards[0][1] + shards[1][1]) == list(map(float, range(40)))


@pytest.mark.parametrize("empty", ["limit(0)", "filter(lit(False))", "an empty aggregate"])
def test_every_rank_starts_whatever_is_empty(cluster: Any, empty: str) -> None:
    from pyspark.sql.functions import lit

    frame = cluster.spark.range(0, 10).selectExpr("cast(id as double) as x")
    nothing = {
        "limit(0)": lambda: frame.limit(0),
        "filter(lit(False))": lambda: frame.filter(lit(False)),
        "an empty aggregate": lambda: frame.filter("x > 100").groupBy("x").count().select("x"),
    }[empty]()

    def train() -> tuple[int, int, list[float]]:
        return tr.world().rank, tr.world().shard("nothing").rows, values("some")

    data = {"nothing": nothing, "some": frame}
    (rank, rows, first), (next_rank, next_rows, second) = launch(cluster, train, data=data)
    assert (rank, rows, next_rank, next_rows) == (0, 0, 1, 0)
    assert sorted(first + second) == list(map(float, range(10)))


def test_a_ranks_exception_is_raised_here_and_the_others_are_gone(cluster: Any) -> None:
    class Diverged(Exception):
        pass

    def train() -> None:
        world = tr.world()
        print("the last words")
        pids = world.gather(os.getpid())
        if world.rank == 1:
            raise Diverged("loss is 1e9", time.time(), pids)
        time.sleep(600)

    with pytest.raises(RankFailed) as caught:
        launch(cluster, train)
    error = caught.value
    assert type(error.__cause__) is Diverged
    assert error.__cause__.args[0] == "loss is 1e9"
    pids = error.__cause__.args[2]
    assert (error.rank, error.pid, error.signal, error.log) == (1, pids[1], None, ["the last words"])
    within("rank raises", time.time() - error.__cause__.args[1])
    assert 'raise Diverged("loss is 1e9", time.time(), pids)' in error.traceback
    if not in_pods(cluster):  # Where each pod has process ids of its own.
        assert [alive(pid) for pid in pids] == [False, False]


def test_a_killed_rank_says_its_signal(cluster: Any) -> None:
    def train() -> None:
        world = tr.world()
        world.barrier()
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RankFailed, match=r"was killed by SIGKILL: (probably out of memory|from outside)") as caught:
        launch(cluster, train)
    assert (caught.value.rank, caught.value.signal) == (0, "SIGKILL")


def test_torch_distributed_works_as_it_stands(cluster: Any) -> None:
    def train() -> tuple[float, int]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item(), torch.get_num_threads()

    assert launch(cluster, train, framework="torch") == [(3.0, 1)] * 2


def test_what_ranks_print_and_log_and_store_arrives(
    cluster: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def train() -> None:
        world = tr.world()
        print("hello from", world.rank)
        world.log(step=0, loss=0.5 + world.rank)
        if world.rank == 0:
            world.store("weights.bin", [b"abc", b"def"])

    launch(cluster, train, output="all", run_dir=str(tmp_path / "run"))
    shown = capfd.readouterr().out.splitlines()
    assert {"[rank 0] hello from 0", "[rank 1] hello from 1"} <= set(shown)
    assert [(tmp_path / f"run/logs/rank-{rank}.log").read_text() for rank in range(2)] == [
        "hello from 0\n",
        "hello from 1\n",
    ]
    assert (tmp_path / "run/weights.bin").read_bytes() == b"abcdef"
    events = (tmp_path / "run/events.jsonl").read_text()
    assert '"values": {"loss": 0.5}' in events
    assert '"values": {"loss": 1.5}' in events


def test_a_file_that_rank_0_alone_can_read_comes_to_every_host_once(cluster: Any, tmp_path: Path) -> None:
    def train() -> tuple[str, str, bytes]:
        world = tr.world()
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(os.urandom(3_000_000))
            file.flush()
            (url, *_) = world.gather(f"file://{file.name}")
            content = Path(file.name).read_bytes() if world.rank == 0 else b""
            fetched = Path(tr.fetch(url))
        return world.host, str(fetched.parent), content or fetched.read_bytes()

    answers = launch(cluster, train, env={"TRITIUM_FETCHED": str(tmp_path / "fetched")})
    assert len({content for *_, content in answers}) == 1
    assert len(set(answers)) == len({host for host, *_ in answers})


def test_two_launches_in_turn_and_the_session_still_answers(cluster: Any) -> None:
    def train() -> str:
        return str(tr.world().run_id)

    runs = [set(launch(cluster, train)) for _ in range(2)]
    assert [len(run) for run in runs] == [1, 1]
    assert runs[0] != runs[1]
    assert cluster.spark.range(5).count() == 5


def test_the_session_answers_after_a_failure_too(cluster: Any) -> None:
    with pytest.raises(RankFailed, match="by zero"):
        launch(cluster, lambda: 1 // (tr.world().rank - 1))
    assert cluster.spark.range(5).count() == 5
    assert launch(cluster, lambda: tr.world().rank) == [0, 1]
