"""The learning rate follows the share of the training done: for more epochs, and at another world size."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from tritium.errors import RankFailed
from tritium.ml import Callback, fit

ROWS, EPOCHS = 48, 5


def table() -> pa.Table:
    x = np.random.default_rng(1).normal(size=(ROWS, 2))
    return pa.table({"a": x[:, 0], "b": x[:, 1], "y": x[:, 0] - x[:, 1]})


class Rates(Callback):
    """A callback that keeps the optimizer's settings at the end of each epoch."""

    def on_epoch_end(self, state: Any) -> None:
        group = state.optimizer.param_groups[0]
        state.history[-1]["rate"] = group["lr"]
        state.history[-1]["momentum"] = float(group["momentum"])


def train(run_dir: Path, epochs: int, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "loss": nn.MSELoss(),
        "optimizer": lambda p: torch.optim.SGD(p, 0.01, momentum=0.5),
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "batch_size": 4,
        "verbose": False,
        "ranks": 1,
        "on": "here",
        "progress": False,
        "output": "none",
        "callbacks": [Rates()],
    }
    return fit(table(), run_dir=str(run_dir), epochs=epochs, **(settings | changes))


def rates(model: Any, name: str = "rate") -> list[float]:
    return [entry[name] for entry in model.history]


def warm(optimizer: Any, steps: int) -> Any:
    first = schedulers.LinearLR(optimizer, 0.1, 1.0, steps // 4)
    return schedulers.SequentialLR(
        optimizer, [first, schedulers.CosineAnnealingLR(optimizer, steps - steps // 4)], [steps // 4]
    )


SCHEDULERS: dict[str, Any] = {
    "cosine": lambda o, steps: schedulers.CosineAnnealingLR(o, steps),
    "one cycle": lambda o, steps: schedulers.OneCycleLR(o, 0.1, total_steps=steps),
    "linear": lambda o, steps: schedulers.LinearLR(o, 1.0, 0.0, steps),
    "lambda": lambda o, steps: schedulers.LambdaLR(o, lambda k: 1 - k / steps),
    "warm-up, then cosine": warm,
    "per epoch": lambda o: schedulers.CosineAnnealingLR(o, EPOCHS),
    "per epoch, exponential": lambda o: schedulers.ExponentialLR(o, 0.7),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_more_epochs_go_on_as_if_there_had_been_so_many_from_the_start(kind: str, tmp_path: Path) -> None:
    settings = {"lr_scheduler": SCHEDULERS[kind], "gradient_accumulation": 5}
    whole = train(tmp_path / "whole", EPOCHS, **settings)
    train(tmp_path / "run", 2, **settings)
    train(tmp_path / "run", 3, **settings)
    model = train(tmp_path / "run", EPOCHS, **settings)
    assert rates(model)[3:] == rates(whole)[3:]
    assert rates(model, "momentum")[3:] == rates(whole, "momentum")[3:]
    notes = json.loads((tmp_path / "run" / "report.json").read_text())["notes"]
    if kind.startswith("per epoch"):
        assert (
            f"the learning rate is that of {EPOCHS} epochs after 3 of them (its schedule was made for 3 before)"
            in notes
        )
    else:
        assert (
            "the learning rate is that of a schedule over 15 optimizer steps after 9 of them (it was one over 9, "
            in str(notes)
        )
        assert rates(model)[-1] < 0.3 * max(rates(model))


def test_a_plateau_is_found_again_in_the_history(tmp_path: Path) -> None:
    settings = {
        "lr_scheduler": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, threshold=10.0, cooldown=1),
        "weight_col": None,
    }
    whole = train(tmp_path / "whole", EPOCHS, **settings)
    train(tmp_path / "run", 3, **settings)
    assert rates(train(tmp_path / "run", EPOCHS, **settings)) == rates(whole)
    assert len(set(rates(whole))) > 1


class Decays(Rates):
    """A callback that changes an option that no scheduler controls."""

    def on_epoch_end(self, state: Any) -> None:
        super().on_epoch_end(state)
        if len(state.history) == 1:
            state.optimizer.param_groups[0]["weight_decay"] = 0.25
        state.history[-1]["decay"] = state.optimizer.param_groups[0]["weight_decay"]


def test_options_that_a_scheduler_leaves_alone_stay_as_a_callback_has_set_them(tmp_path: Path) -> None:
    settings = {"lr_scheduler": SCHEDULERS["one cycle"], "callbacks": [Decays()]}
    train(tmp_path, 2, **settings)
    assert rates(train(tmp_path, 3, **settings), "decay") == [0.25] * 3


def dies(step: int) -> Any:
    def train_step(module: Any, batch: Any) -> Any:
        if (batch.epoch, batch.step) == (2, step) and module.training and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        output = module(batch["features"])
        return nn.functional.mse_loss(output, batch["label"])

    return train_step


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["one cycle", "lambda"])
def test_at_another_world_size_the_schedule_ends_with_the_training(kind: str, tmp_path: Path) -> None:
    """Killed at 2 ranks in the middle of the third epoch (6 steps each), continues with 1 rank (12 steps each)."""
    settings = {"lr_scheduler": SCHEDULERS[kind], "loss": None, "if_code_changed": "continue"}
    with pytest.raises(RankFailed, match="SIGKILL"):
        train(tmp_path / "run", 4, ranks=2, on="driver", retries=0, checkpoint_every=1, train_step=dies(4), **settings)
    model = train(tmp_path / "run", 4, train_step=dies(99), **settings)
    whole = train(tmp_path / "whole", 4, train_step=dies(99), **settings)
    assert [entry["rows"] for entry in model.history] == [ROWS] * 4
    assert rates(model)[2:] == rates(whole)[2:]
    notes = str(json.loads((tmp_path / "run" / "report.json").read_text())["notes"])
    assert "that of a schedule over 48 optimizer steps after " in notes
    assert "(it was one over 24, after " in notes


class Grows(Rates):
    """A callback that adds the first layer's weights to the optimizer after an epoch, with their own learning rate."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies

    def on_epoch_end(self, state: Any) -> None:
        super().on_epoch_end(state)
        if state.epoch == 2:
            state.optimizer.add_param_group({"params": state.module[0].parameters(), "lr": 0.003, "momentum": 0.25})
        state.history[-1]["added"] = [(g["lr"], g["momentum"]) for g in state.optimizer.param_groups[1:]]
        if self.dies and state.epoch == 4:
            raise RuntimeError("cut off")


@pytest.mark.parametrize("kind", ["one cycle", "lambda", "per epoch, exponential"])
def test_a_group_that_a_callback_adds_keeps_its_learning_rate(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)),
        "optimizer": lambda p: torch.optim.SGD(list(p)[2:], 0.01, momentum=0.5),
        "lr_scheduler": SCHEDULERS[kind],
        "checkpoint_every": 6,  # twice an epoch
        "retries": 0,
    }
    whole = train(tmp_path / "whole", EPOCHS, callbacks=[Grows()], **settings)
    assert [entry["added"] for entry in whole.history] == [[]] + [[(0.003, 0.25)]] * 4
    notes = json.loads((tmp_path / "whole" / "report.json").read_text())["notes"]
    assert str(notes).count("lr_scheduler leaves the learning rate of 1 group of the optimizer as it is") == 1
    alone = train(tmp_path / "alone", EPOCHS, **settings)
    assert rates(whole) == rates(alone), "the schedule of the others is what it was"
    with pytest.raises(RuntimeError, match="cut off"):
        train(tmp_path / "cut", EPOCHS, callbacks=[Grows(dies=True)], **settings)
    cut = train(tmp_path / "cut", EPOCHS, callbacks=[Grows()], **settings)
    assert (rates(cut), rates(cut, "added")) == (rates(whole), rates(whole, "added"))
    train(tmp_path / "longer", 3, callbacks=[Grows()], **settings)
    longer = train(tmp_path / "longer", EPOCHS, callbacks=[Grows()], **settings)
    assert (rates(longer)[3:], rates(longer, "added")) == (rates(whole)[3:], rates(whole, "added"))
