"""A rank that waits in a collective for one that has returned is told within seconds, and one that does not goes on."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tritium as tr
from tritium.errors import Stalled
from tritium.gang.coordinator.returned import IDLE_SECONDS

BOUND = 20.0  # seconds from the return to the error: 3 idle ones, heartbeats a second apart, a busy machine


def run(program: Any, *args: Any, ranks: int = 2, framework: Any = "torch", **settings: Any) -> list[Any]:
    quiet = {"progress": False, "output": "none", "on": "driver"}  # retries, and stall_timeout, by default
    return tr.launch(program, args=args, ranks=ranks, framework=framework, **{**quiet, **settings})


def all_reduce(mark: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    mark.touch()
    if tr.world().rank != 1:
        dist.all_reduce(torch.ones(1))


def wait_for_work(mark: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    mark.touch()
    if tr.world().rank == 1:
        dist.destroy_process_group()
    else:
        dist.all_reduce(torch.ones(1), async_op=True).wait()


def a_step_more(mark: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    for _ in range(2 if tr.world().rank == 1 else 3):
        net(torch.ones(4, 2)).sum().backward()
        mark.touch()


def a_step_more_by_gloo(mark: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=dist.new_group())
    for _ in range(2 if tr.world().rank == 1 else 3):
        net(torch.ones(4, 2)).sum().backward()
        mark.touch()


def gather_arrays(mark: Path, leaves: int) -> None:
    import jax.numpy as jnp
    from jax.experimental.multihost_utils import process_allgather

    process_allgather(jnp.ones(2))
    mark.touch()
    if tr.world().rank != leaves:
        process_allgather(jnp.ones(2))


def reduce_in_a_graph(mark: Path) -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def step() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones(2))

    @tf.function
    def together() -> Any:
        return strategy.run(step)

    together()
    mark.touch()
    if tr.world().rank != 1:
        together()


def another_tree(mark: Path) -> None:
    import lightgbm

    x = np.random.default_rng(tr.world().rank).normal(size=(200, 3))
    booster = lightgbm.Booster({"verbose": -1, "objective": "regression"}, lightgbm.Dataset(x, x[:, 0]))
    for _ in range(2 if tr.world().rank == 1 else 3):
        booster.update()
        mark.touch()


def told(program: Any, mark: Path, *args: Any, leaves: int = 1, **settings: Any) -> Stalled:
    """Return the error of a run, which came within seconds of the last collective that all ranks were in."""
    with pytest.raises(Stalled) as caught:
        run(program, mark, *args, **settings)
    assert time.time() - mark.stat().st_mtime < BOUND
    error = caught.value
    assert (error.rank, error.lost) == (leaves, False)
    assert "retry" not in str(error).lower(), "it is not tried again"
    assert re.match(rf"Rank {leaves} on \S+ is not where the others wait: its function has returned\. It ", str(error))
    assert f"  rank {leaves} (host {error.host}): its function has returned" in str(error)
    assert "Every rank must make the same collective calls" in str(error)
    return error


@pytest.mark.parametrize("function", [all_reduce, wait_for_work, a_step_more, a_step_more_by_gloo])
def test_torch(function: Callable[[Path], None], tmp_path: Path) -> None:
    error = told(function, tmp_path / "mark")
    assert re.search(
        rf"  rank 0 \(host \S+\): no step reported, in {function.__name__}\(\) at test_returned", str(error)
    )
    assert f"in {function.__name__}" in error.stacks[0]
    if function is all_reduce:
        assert "It never reached the all_reduce in which rank 0 waits (no step reported)." in str(error)


@pytest.mark.parametrize("leaves", [0, 1])
def test_jax(leaves: int, tmp_path: Path) -> None:
    told(gather_arrays, tmp_path / "mark", leaves, leaves=leaves, framework="jax")


def test_tensorflow(tmp_path: Path) -> None:
    told(reduce_in_a_graph, tmp_path / "mark", framework="tensorflow")


def test_lightgbm(tmp_path: Path) -> None:
    error = told(another_tree, tmp_path / "mark", framework="lightgbm")
    assert re.search(r"  rank 0 \(host \S+\): .*in another_tree\(\) at test_returned.py:\d+ → update", str(error))


SCRIPT = """
import pathlib, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
pathlib.Path(sys.argv[1]).touch()
if dist.get_rank() == 1:
    sys.exit(0)
dist.all_reduce(torch.ones(1))
"""


def test_a_script_that_exits_with_0(tmp_path: Path) -> None:
    tmp_path.joinpath("train.py").write_text(SCRIPT)
    with pytest.raises(Stalled) as caught:
        run(tmp_path / "train.py", str(tmp_path / "mark"), ranks=3)
    assert time.time() - (tmp_path / "mark").stat().st_mtime < BOUND
    assert "It never reached the all_reduce in which ranks 0, 2 wait" in str(caught.value)
    assert len(re.findall(r"  rank [02] .*in <module>\(\) at train.py:10 → all_reduce", str(caught.value))) == 2


def test_several_that_have_returned(tmp_path: Path) -> None:
    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if tr.world().rank == 1:
            dist.barrier()

    with pytest.raises(
        Stalled, match=r"^Ranks 0, 2 on \S+ are not where the others wait: their functions have"
    ) as caught:
        run(train, ranks=3)
    assert "They never reached the barrier in which rank 1 waits" in str(caught.value)


def test_only_reported_where_stalls_are() -> None:
    """A wait that is cut short is an error, which `on_stall="report"` is not to make of a stall."""

    def train(seconds: float) -> str:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        received = torch.zeros(1)
        if tr.world().rank == 1:
            threading.Timer(seconds, lambda: dist.send(torch.ones(1), 0)).start()
            return "sends later"
        dist.recv(received, 1)
        return str(received.item())

    assert run(train, 2 * IDLE_SECONDS, on_stall="report") == ["1.0", "sends later"]


class TestNoFalseAlarm:
    def test_who_waits_for_something_else_goes_on(self) -> None:
        """Rank 0 waits for a worker of a DataLoader, for rank 1 and for a server in rank 3, which has returned."""

        class Slow:
            def __len__(self) -> int:
                return 2

            def __getitem__(self, index: int) -> int:
                time.sleep(2 * IDLE_SECONDS)  # a download
                return index

        def serve(listener: socket.socket) -> None:
            with listener, listener.accept()[0] as connection:
                connection.recv(1)
                time.sleep(2 * IDLE_SECONDS)  # the answer takes a while
                connection.sendall(b"answer")

        def train() -> Any:
            import torch
            import torch.distributed as dist

            rank = tr.world().rank
            dist.init_process_group("gloo")
            pair = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1))
            listener = socket.create_server(("127.0.0.1", 0))
            port = tr.world().gather(listener.getsockname()[1])[3]
            if rank == 3:
                threading.Thread(target=serve, args=[listener]).start()
            if rank > 1:
                return None
            found: list[Any] = []
            if rank == 0:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(b"?")
                    found.append(connection.recv(6))
                found += [int(each) for each in torch.utils.data.DataLoader(Slow(), num_workers=2)]
            total = torch.ones(1)
            dist.all_reduce(total, group=pair)  # of the ranks that have not returned
            return [*found, total.item()]

        assert run(train, ranks=4) == [[b"answer", 0, 1, 2.0], [2.0], None, None]

    @pytest.mark.parametrize("leaves", [0, 1])
    def test_jax_computes_on_after_a_wait(self, leaves: int) -> None:
        def train() -> float:
            import jax.numpy as jnp
            from jax.experimental.multihost_utils import process_allgather

            process_allgather(jnp.ones(2))
            if tr.world().rank != leaves:
                time.sleep(2 * IDLE_SECONDS)
            return float(jnp.ones(3).sum())

        assert run(train, framework="jax") == [3.0, 3.0]

    def test_tensorflow_computes_on_after_a_wait(self) -> None:
        def train() -> float:
            import tensorflow as tf

            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            if tr.world().rank != 0:
                time.sleep(2 * IDLE_SECONDS)
            return float(tf.reduce_sum(tf.ones(3)) + strategy.num_replicas_in_sync)

        assert run(train, framework="tensorflow") == [5.0, 5.0]
