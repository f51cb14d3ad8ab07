"""Lightning: a Trainer without arguments about processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tritium as tr

FRAMEWORK, ENV, PACKAGES = "lightning", {}, ("lightning",)  # type: ignore[var-annotated]


def train(on_step: Callable[[int], None]) -> dict[str, Any]:
    import lightning
    import torch

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
            torch.nn.init.zeros_(self.linear.weight)
            torch.nn.init.zeros_(self.linear.bias)

        def training_step(self, batch: Any, index: int) -> Any:
            on_step(self.current_epoch)
            return torch.nn.functional.mse_loss(self.linear(batch["x"])[:, 0], batch["y"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    shard = tr.world().shard("train")
    trainer = lightning.Trainer(max_epochs=20, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    model = Regression()
    trainer.fit(model, shard.loader(batch_size=shard.rows))
    weights = [*model.linear.weight[0].tolist(), model.linear.bias.item()]
    return {"rank": trainer.global_rank, "size": trainer.world_size, "weights": weights}
