"""Epochs without a validation."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import numpy as np
import pandas as pd
import pytest
import torch

from tritium.errors import BadSetting
from tritium.ml import LightningEstimator

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}


def frame(rows: int = 40) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    found = pd.DataFrame({"a": draw.random(rows, np.float32), "b": draw.random(rows, np.float32)})
    return found.assign(y=found.a + found.b, z=found.a - found.b, w=np.ones(rows), s=np.zeros(rows))


def test_lightning_stops_early_by_validations_of_every_epoch() -> None:
    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def training_step(self, batch: Any, index: int) -> Any:
            return ((self(batch[0]) - batch[1]) ** 2).mean()

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    given = {"feature_cols": ["a", "b"], "label_cols": ["y"], "validation": 0.25, "epochs": 4, **HERE}
    sparse = LightningEstimator(model=Net(), trainer_args={"check_val_every_n_epoch": 2}, **given).fit(frame())
    assert ["validation_loss" in entry for entry in sparse.history] == [False, True, False, True]
    with pytest.raises(BadSetting, match=r"trainer_args has check_val_every_n_epoch=2. Leave that out"):
        LightningEstimator(model=Net(), trainer_args={"check_val_every_n_epoch": 2}, early_stopping=2, **given).fit(
            frame()
        )
