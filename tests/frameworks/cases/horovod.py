"""Horovod: DistributedOptimizer around one of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tritium as tr

FRAMEWORK, ENV, PACKAGES = "horovod", {}, ("horovod",)  # type: ignore[var-annotated]
INSTALL = "make horovod"


def train(on_step: Callable[[int], None]) -> dict[str, Any]:
    import horovod.torch as hvd  # type: ignore[import-not-found]
    import torch

    hvd.init()
    model = torch.nn.Linear(4, 1)
    if hvd.rank() == 0:
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    shard = tr.world().shard("train")
    for epoch in shard.epochs(20, batch_size=shard.rows):
        for batch in epoch:
            on_step(epoch.number)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"]).backward()
            optimizer.step()
    return {"rank": hvd.rank(), "size": hvd.size(), "weights": [*model.weight[0].tolist(), model.bias.item()]}
