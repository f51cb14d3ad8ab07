"""A small training with Lightning, whose loss goes to a logger."""

from __future__ import annotations

from typing import Any

import lightning
import torch

import tritium as tr


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.linear(batch["x"][:, None]).mean() ** 2
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(logger: Any, **settings: Any) -> None:
    """Train on this rank's rows of the column x."""
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(logger=logger, **quiet, **settings)
    trainer.fit(Regression(), tr.world().shard("train").loader(batch_size=16))
