"""What a user's functions do wrong with Lightning is said on the driver, before a rank starts."""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadSetting
from tritium.ml import LightningSettings
from tritium.ml.fitting import Plan, prepare
from tritium.ml.lightning.backend import LightningBackend

COLUMNS: dict[str, Any] = {"feature_cols": ["a", "b"], "label_cols": ["y"], "verbose": False}


def rows(count: int = 20) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame({name: draw.random(count) for name in ("a", "b", "y")})


def planned(model: Any = None, **changes: Any) -> Plan:
    settings = LightningSettings(model=model or Module(), **COLUMNS, **changes)
    return prepare(LightningBackend(), rows(), settings, tr.Gang(on="here"))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, features: Any) -> Any:
        return self.layer(features)

    def training_step(self, batch: Any, number: int) -> Any:
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Misspelt(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), 0.1)


class AsksTrainer(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1 / self.trainer.estimated_stepping_batches)


class Short(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any) -> None:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": Misspelt()}, "configure_optimizers of Misspelt fails: AttributeError: 'Misspelt' object has no att"),
        ({"callbacks": [Short()]}, "on_train_batch_end of the callback Short takes trainer, module; it is called with"),
    ],
    ids=["optimizer", "callback"],
)
def test_functions_of_lightning(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        planned(**changes)
    assert says in str(caught.value)


def test_what_asks_for_the_trainer_is_left_to_the_ranks() -> None:
    module, before = AsksTrainer(), torch.get_rng_state()
    planned(model=module, callbacks=[lightning.Callback()])
    assert torch.equal(before, torch.get_rng_state())
