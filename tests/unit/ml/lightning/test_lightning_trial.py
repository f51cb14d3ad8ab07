"""What a user's functions do wrong with Lightning is said on the driver, before a rank starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadData, BadSetting
from tritium.ml import LightningSettings
from tritium.ml.fitting import Plan, prepare, run
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


class OfCallback(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)


class Rates(lightning.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.rate = 0.1


def test_what_a_callback_prepares_is_left_to_the_ranks() -> None:
    planned(model=OfCallback(), callbacks=[lightning.Callback(), Rates()])
    with pytest.raises(BadSetting, match="configure_optimizers of OfCallback fails"):
        planned(model=OfCallback(), callbacks=[lightning.pytorch.callbacks.ModelSummary(), lightning.Callback()])


class Conv(Module):
    """A module of images, which have their channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_images_are_refused_in_the_same_words_on_the_driver_and_in_a_rank() -> None:
    frame = pa.table({"image": [bytes(48)] * 8, "y": np.zeros(8)})
    decode = {"image": lambda content: np.frombuffer(content, np.uint8).reshape(4, 4, 3)}
    settings = LightningSettings(
        model=Conv(), feature_cols="image", label_cols=["y"], decode=decode, verbose=False, checkpoint_every=None
    )
    gang = tr.Gang(on="here", progress=False, output="none", framework="lightning")
    with pytest.raises(BadData) as known:
        prepare(LightningBackend(), frame, settings, gang)
    line = "It takes features as [batch, 3, 4, 4] float32: in forward, features = features.permute(0, 3, 1, 2) / 255."
    assert line in str(known.value)
    plan = prepare(LightningBackend(), frame.slice(0, 0), settings, gang)
    data = {"train": dataclasses.replace(plan.data["train"], frame=frame)}
    with pytest.raises(BadData) as caught:
        run(dataclasses.replace(plan, data=data))
    assert str(caught.value) == str(known.value)


class Normed(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_a_batch_of_one_row_that_can_not_be_trained_with_is_refused_before_the_first_step() -> None:
    plan = planned(model=Normed(), batch_size=19, checkpoint_every=None)
    gang = tr.Gang(on="here", progress=False, output="none", framework="lightning")
    with pytest.raises(BadData, match=r"batch of one row \(rows per rank: 20; batch_size=19\).*remainder='drop'"):
        run(dataclasses.replace(plan, gang=gang))
