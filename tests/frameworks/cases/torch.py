"""PyTorch: DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tritium as tr

FRAMEWORK, ENV, PACKAGES = "torch", {}, ("torch",)  # type: ignore[var-annotated]


def train(on_step: Callable[[int], None]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard = tr.world().shard("train")
    for epoch in shard.epochs(20, batch_size=shard.rows):
        for batch in epoch:
            on_step(epoch.number)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(replica(batch["x"])[:, 0], batch["y"]).backward()
            optimizer.step()
    weights = [*model.weight[0].tolist(), model.bias.item()]
    size = dist.get_world_size()
    dist.destroy_process_group()
    return {"rank": tr.world().rank, "size": size, "weights": weights}
