"""Tests that need a real NVIDIA GPU. Skipped where there is none; `pytest -m gpu` runs them where there is."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from gpu.gpus import MARKS, ON_GPU
from tritium.errors import BadSetting

pytestmark = MARKS


def test_a_rank_gets_its_gpu_and_trains_there() -> None:
    def train() -> tuple[str, int, str]:
        import torch

        world = tr.world()
        batch = next(iter(next(world.shard("train").epochs(1, batch_size=64, device=world.device))))
        return world.device, torch.cuda.device_count(), str(batch["x"].device)

    table = pd.DataFrame({"x": np.arange(1000, dtype="float32")})
    device, count, where = tr.launch(train, ranks=1, gpus=1, on="driver", framework="torch", data={"train": table})[0]
    assert (device, count, where) == ("cuda:0", 1, "cuda:0")


def test_batches_on_the_gpu_are_those_of_the_cpu() -> None:
    def read(device: str | None) -> list[list[float]]:
        shard = tr.world().shard("train")
        return [batch["x"].tolist() for epoch in shard.epochs(2, batch_size=64, device=device) for batch in epoch]

    table = pd.DataFrame({"x": np.arange(1000, dtype="float32")})
    settings = {"ranks": 1, "gpus": 1, "on": "driver", "data": {"train": table}}
    on_gpu = tr.launch(read, args=("cuda:0",), **settings)
    assert on_gpu == tr.launch(read, args=(None,), **settings)


def test_a_checkpoint_of_tensors_on_the_gpu() -> None:
    def save() -> list[bool]:
        import torch

        world = tr.world()
        net = torch.nn.Linear(300, 200, device=world.device)
        optimizer = torch.optim.Adam(net.parameters())
        equal = []
        for step in (1, 2):  # the second time in the same page-locked memory
            net(torch.rand(8, 300, device=world.device)).sum().backward()
            optimizer.step()
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.cuda.get_rng_state()}
            wanted = {name: value.cpu().clone() for name, value in net.state_dict().items()}
            world.checkpoint.save(state, step)
            with torch.no_grad():
                net.weight.zero_()
            found = world.checkpoint.load()
            assert found is not None
            equal.append(all(torch.equal(found["net"][name], value) for name, value in wanted.items()))
            optimizer.load_state_dict(found["optimizer"])
            net.load_state_dict(found["net"])
        return equal

    assert tr.launch(save, ranks=1, gpus=1, on="driver", framework="torch") == [[True, True]]


def test_an_allreduce_over_nccl() -> None:
    def reduce() -> list[float]:
        import torch
        import torch.distributed as dist

        world = tr.world()
        dist.init_process_group("nccl")
        ones = torch.ones(4, device=world.device)
        dist.all_reduce(ones)
        dist.destroy_process_group()
        return ones.tolist()

    assert tr.launch(reduce, ranks=1, gpus=1, on="driver", framework="torch") == [[1.0] * 4]


def count() -> int:
    """Return how many GPUs this machine has."""
    if shutil.which("nvidia-smi") is None:
        return 0
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())


def test_its_kind_is_read_and_can_be_required() -> None:
    def device() -> Any:
        return tr.world().peers[0].devices[0]

    (found,) = tr.launch(device, **ON_GPU)
    assert found.uuid.startswith(("GPU-", "MIG-"))
    kind = found.name.split()[1]  # NVIDIA H200 …
    assert tr.launch(device, **ON_GPU, gpu_type=kind) == [found]
    with pytest.raises(BadSetting, match=f"is a {found.name}"):
        tr.launch(device, **ON_GPU, gpu_type="no such kind")


def test_two_ranks_share_one_over_gloo() -> None:
    def reduce() -> tuple[str, int, list[float]]:
        import torch
        import torch.distributed as dist

        device = tr.world().device
        dist.init_process_group("gloo")
        ones = torch.ones(4, device=device).sum().cpu().reshape(1)
        dist.all_reduce(ones)
        dist.destroy_process_group()
        return device, torch.cuda.device_count(), ones.tolist()

    assert tr.launch(reduce, **{**ON_GPU, "ranks": 2, "gpus": 0.5}, framework="torch") == [("cuda:0", 1, [8.0])] * 2


@pytest.mark.skipif(count() < 2, reason="needs two NVIDIA GPUs")
def test_an_allreduce_over_nccl_between_two() -> None:
    def reduce() -> tuple[str, list[float]]:
        import torch
        import torch.distributed as dist

        world = tr.world()
        torch.cuda.set_device(world.device)
        dist.init_process_group("nccl")
        ones = torch.ones(4, device=world.device)
        dist.all_reduce(ones)
        dist.destroy_process_group()
        return world.device, ones.tolist()

    results = tr.launch(reduce, **{**ON_GPU, "ranks": 2}, framework="torch")
    assert results == [("cuda:0", [2.0] * 4), ("cuda:1", [2.0] * 4)]
