"""Hugging Face: transformers.Trainer, which makes its batches of single rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import tritium as tr

FRAMEWORK, ENV, PACKAGES = "huggingface", {}, ("transformers", "accelerate")  # type: ignore[var-annotated]


def train(on_step: Callable[[int], None]) -> dict[str, Any]:
    import torch
    import transformers

    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
            torch.nn.init.zeros_(self.linear.weight)
            torch.nn.init.zeros_(self.linear.bias)

        def forward(self, x: Any, y: Any) -> dict[str, Any]:
            return {"loss": torch.nn.functional.mse_loss(self.linear(x)[:, 0], y)}

    class OnStep(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            on_step(state.global_step)

    shard, model = tr.world().shard("train"), Regression()
    settings = {"num_train_epochs": 20, "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        tempfile.gettempdir(), per_device_train_batch_size=shard.rows, optim="sgd", **settings, **quiet
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=shard.dataset(), callbacks=[OnStep()])
    trainer.train()
    weights = [*model.linear.weight[0].tolist(), model.linear.bias.item()]
    return {"rank": arguments.process_index, "size": arguments.world_size, "weights": weights}
