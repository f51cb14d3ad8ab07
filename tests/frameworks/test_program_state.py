"""What a program has set for its process or its thread changes nothing of what torch's ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tritium as tr
from program_state import OF_TORCH, STATES, be_late, each, launched, use_all


def with_torch(step: int) -> list[Any]:
    """Do as `use_all`, and average gradients in memory, each rank being once the slower one."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    found = use_all(step)
    x = torch.ones(1, 1, device="cpu", dtype=torch.float32) + tr.world().rank
    with torch.inference_mode(False), torch.enable_grad():
        module = nn.Linear(1, 1, bias=False, device="cpu", dtype=torch.float32)
        net = DistributedDataParallel(module)
        for turn in range(4):  # at the second, DDP arranges its buckets
            if turn > 1 and tr.world().rank == turn % 2:
                be_late()
            module.zero_grad()
            net(x.clone()).sum().backward()
    tr.world().checkpoint.save({"x": x}, step)
    loaded = tr.world().checkpoint.load()
    assert loaded is not None
    (epoch,) = tr.world().shard("train").epochs(1, batch_size=8)
    (batch,) = epoch
    return [found, module.weight.grad.tolist(), *(f"{each.dtype} {each.device}" for each in (loaded["x"], batch["x"]))]


def train() -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = each({**STATES, **OF_TORCH}, with_torch)
    dist.destroy_process_group()
    return found


def test_in_a_rank(tmp_path: Path) -> None:
    for found in launched(train, run_dir=tmp_path / "run", framework="torch"):
        assert {name: result for name, result in found.items() if result != found[""]} == {}
        assert found[""][1:] == [[[1.5]], "torch.float32 cpu", "torch.float32 cpu"]
