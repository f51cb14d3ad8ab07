"""PyTorch in a gang: FSDP2 and its checkpoints, the compiler, and workers of a DataLoader."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest

import tritium as tr
from machines import can_make_hosts, run_on_hosts
from tritium.errors import BadSetting
from tritium.frameworks import find

FRAME = pd.DataFrame({"x": [row.astype("float32") for row in np.random.default_rng(0).random((64, 5))]})


def run(fn: Any, ranks: int = 2, **settings: Any) -> list[Any]:
    quiet = {"on": "driver", "progress": False, "output": "none", "retries": 0, "framework": "torch"}
    return tr.launch(fn, ranks=ranks, **{**quiet, **settings})


def sharded_training(steps: int, kill: bool = False) -> dict[str, Any]:
    """Train under FSDP2, with widths that 2 does not divide; continue from the checkpoint that is there."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    world = tr.world()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    saved, start, position = world.checkpoint.load(), 0, None
    if saved is not None:
        start, own = saved.step, saved.own[world.rank]
        net.load_state_dict(own["net"])
        optimizer.load_state_dict(own["optimizer"])
        position = own["position"]
    shard = world.shard("train")
    step = start
    for epoch in shard.epochs(steps // 4, batch_size=8, resume=position):
        for batch in epoch:
            step += 1
            optimizer.zero_grad()
            net(batch["x"]).square().mean().backward()
            optimizer.step()
            if kill and step == 6 and world.rank == 1 and start == 0:
                world.checkpoint.wait()
                os.kill(os.getpid(), signal.SIGKILL)

            def own_state() -> dict[str, Any]:
                return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "position": shard.state()}

            world.checkpoint.save(lambda: {}, step, own=own_state, every=4)
    shares = [type(value) is DTensor and value.to_local().numel() for value in net.state_dict().values()]
    weights = [value.full_tensor().tolist() for value in net.state_dict().values()]
    dist.destroy_process_group()
    return {"start": start, "shares": shares, "weights": weights}


def test_fsdp2_continues_from_the_shards_that_each_rank_saved(tmp_path: Path) -> None:
    whole = run(sharded_training, args=(12,), data={"train": FRAME})
    found = run(sharded_training, args=(12, True), data={"train": FRAME}, run_dir=str(tmp_path), retries=1)
    assert [each["start"] for each in found] == [4, 4]
    assert found[0]["weights"] == found[1]["weights"] == whole[0]["weights"]
    each_holds = [5 * 4 + 4 + 2 * 7 + 2, 5 * 3 + 3 + 1 * 7 + 1]
    assert [sum(each["shares"]) for each in found] == each_holds
    sizes = [sum(p.stat().st_size for p in tmp_path.rglob(f"own-{rank}.safetensors")) for rank in range(2)]
    assert sizes[1] < sizes[0]


def test_a_shard_of_a_tensor_in_the_state_that_rank_0_writes_is_refused(tmp_path: Path) -> None:
    def train() -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        net = torch.nn.Linear(5, 7)
        fully_shard(net)
        tr.world().checkpoint.save({"net": net.state_dict()}, 1)
        tr.world().checkpoint.wait()

    with pytest.raises(BadSetting, match=r"state\['net'\]\['weight'\] is a DTensor.*own=.*full_tensor"):
        run(train, run_dir=str(tmp_path))


def test_a_compiled_model_trains_as_the_one_it_was_made_of() -> None:
    """With inductor where there is a C++ compiler, else with aot_eager, which needs none."""

    def train() -> list[list[float]]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        backend = "inductor" if shutil.which("g++") else "aot_eager"
        found = []
        for compiled in (False, True):
            torch.manual_seed(0)
            net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1))
            called = torch.compile(net, backend=backend) if compiled else net
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for batch in tr.world().shard("train").loader(batch_size=8):
                optimizer.zero_grad()
                called(batch["x"]).square().mean().backward()
                optimizer.step()
            found.append([value for p in net.parameters() for value in p.flatten().tolist()])
        dist.destroy_process_group()
        return found

    results = run(train, data={"train": FRAME})
    for plain, compiled in results:
        assert compiled == pytest.approx(plain, rel=1e-4)
        assert plain == results[0][0]


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_workers_of_a_dataloader_end_with_their_rank(ends: str, tmp_path: Path) -> None:
    def train() -> list[int]:
        import torch

        class Squares(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return 12

            def __getitem__(self, index: int) -> int:
                tmp_path.joinpath(str(os.getpid())).touch()
                return index * index

        loader = torch.utils.data.DataLoader(Squares(), batch_size=3, num_workers=2, persistent_workers=True)
        found = [value for batch in loader for value in batch.tolist()]
        if ends == "raises" and tr.world().rank == 1:
            raise ValueError("the user's own")
        return found

    # A process that ends without exit handlers leaves multiprocessing's empty directory in TMPDIR, as any Python does.
    # The path is short: the sockets there have at most 107 characters.
    with tempfile.TemporaryDirectory() as place:
        if ends == "raises":
            with pytest.raises(tr.errors.RankFailed, match="the user's own"):
                run(train, env={"TMPDIR": place})
        else:
            assert run(train, env={"TMPDIR": place}) == [[number * number for number in range(12)]] * 2
            assert not os.listdir(place)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 4
    # a worker looks every 5 s whether its rank is there, and a killed rank can't tell it
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], timeout=20)
    assert not alive


class Metric:
    """A class of the user's, of a module that no rank has on its path."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Scaled:
    """A dataset of the user's."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 10 * index


def test_own_classes_are_pickled_by_name(tmp_path: Path) -> None:
    def train() -> tuple[Any, Any, list[list[int]]]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, Metric(rank))
        assert all(type(metric) is Metric for metric in gathered)
        torch.save(Metric(rank), tmp_path / f"{rank}.pt")
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert type(saved) is Metric
        data: Any = Scaled()
        rows = []
        for context in ("spawn", "forkserver") if rank == 0 else ():
            loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context)
            rows += [batch.tolist() for batch in loader]
        dist.destroy_process_group()
        return saved, gathered, rows

    for rank, (saved, gathered, rows) in enumerate(run(train)):
        assert type(saved) is Metric
        assert [saved.rank, *(metric.rank for metric in gathered)] == [rank, 0, 1]
        assert rows == ([[0, 10, 20, 30]] * 2 if rank == 0 else [])


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
@pytest.mark.parametrize("cable", ["routed", "own"])
def test_hosts_train_by_the_addresses_at_which_they_reach_each_other(tmp_path: Path, cable: Any) -> None:
    """The name of each stands for an address that the other can't reach; nor is it reached there from the driver."""

    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ones = torch.ones(4)
        dist.all_reduce(ones)
        interface = os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
        Path(tmp_path, str(tr.world().rank)).write_text(f"{ones.tolist()} {interface}")
        dist.destroy_process_group()

    run_on_hosts(train, framework=find("torch"), each=2, known="192.0.2.7 {name}", cable=cable)
    network = "eth0" if cable == "routed" else "direct"
    wanted = f"{[4.0] * 4} {(network, network)}"
    assert [Path(tmp_path, str(rank)).read_text() for rank in range(4)] == [wanted] * 4


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_hosts_that_do_not_reach_each_other_are_named() -> None:
    began = time.monotonic()
    with pytest.raises(BadSetting, match=r"host tritium-\S+ of rank 0 has the addresses 10\.\S+, and all other hosts"):
        run_on_hosts(lambda: None, framework=find("torch"), cable=None)
    assert time.monotonic() - began < 30
