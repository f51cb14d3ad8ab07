"""Several optimizers through a `train_step`: as one process by hand, on two ranks, and in a training that continues."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from tritium.errors import BadSetting
from tritium.ml import Callback, TrainState, fit

ROWS = 48
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}
DRIVER: dict[str, Any] = {**HERE, "on": "driver", "ranks": 2}


def table() -> pa.Table:
    x = np.random.default_rng(2).normal(size=(ROWS, 3))
    return pa.table({f"x{i}": x[:, i] for i in range(3)} | {"y": x[:, 0] - x[:, 1]})


class Gan(nn.Module):
    """A generator of labels, and a critic that tells them from the real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.generator(x)

    def judged(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.critic(torch.cat([x, y], 1))


def gan_step(module: Any, batch: Any, optimizer: str) -> torch.Tensor:
    assert not module.unused.weight.requires_grad or not module.training
    x, y = batch["features"], batch["label"]
    score = nn.functional.binary_cross_entropy_with_logits
    made = module.judged(x, module(x))
    if optimizer == "generator":
        assert not module.training or not any(p.requires_grad for p in module.critic.parameters())
        return score(made, torch.ones_like(made))
    real = module.judged(x, y)
    return score(real, torch.ones_like(real)) + score(made, torch.zeros_like(made))


def two(module: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "critic": torch.optim.Adam(module.critic.parameters(), 0.01),
        "generator": torch.optim.SGD(module.generator.parameters(), 0.1, momentum=0.5),
    }


GOOD: dict[str, Any] = {
    "model": Gan,
    "train_step": gan_step,
    "optimizer": two,
    "feature_cols": ["x0", "x1", "x2"],
    "label_cols": ["y"],
    "batch_size": 8,
    "epochs": 2,
    "shuffle": False,
}


def by_hand() -> tuple[nn.Module, list[dict[str, float]]]:
    module = fit(table(), **GOOD | HERE | {"optimizer": still, "epochs": 1}).module.train()
    optimizers, rows, history = two(module), table(), []
    x = torch.tensor(np.stack([rows[f"x{i}"] for i in range(3)], 1), dtype=torch.float32)
    y = torch.tensor(rows["y"].to_numpy(), dtype=torch.float32)[:, None]
    module.unused.requires_grad_(False)
    for _ in range(2):
        losses = {"critic": 0.0, "generator": 0.0}
        for start in range(0, ROWS, 8):
            batch = {"features": x[start : start + 8], "label": y[start : start + 8]}
            for name, optimizer in optimizers.items():
                for other in optimizers:
                    getattr(module, other).requires_grad_(other == name)
                loss = gan_step(module, batch, name)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[name] += loss.item() * 8 / ROWS
        history.append(losses)
    return module, history


def still(module: Any) -> dict[str, torch.optim.Optimizer]:
    """Return optimizers that change nothing, for the initial weights."""
    parts = {"critic": module.critic, "generator": module.generator}
    return {name: torch.optim.SGD(part.parameters(), 0.0) for name, part in parts.items()}


def test_it_is_what_a_loop_by_hand_computes() -> None:
    module, history = by_hand()
    model = fit(table(), **GOOD | HERE)
    for name, mine in model.module.named_parameters():
        torch.testing.assert_close(mine, module.get_parameter(name), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.history, history, strict=True):
        assert mine["critic_loss"] == pytest.approx(theirs["critic"], rel=1e-5)
        assert mine["generator_loss"] == pytest.approx(theirs["generator"], rel=1e-5)
        assert mine["loss"] == pytest.approx(sum(theirs.values()), rel=1e-5)


def test_validation_clipping_and_early_stopping() -> None:
    from tritium.ml import EarlyStopping

    stopping = EarlyStopping(patience=5, monitor="validation_generator_loss")
    model = fit(table(), **GOOD | HERE, validation=0.25, clip_grad_norm=0.1, early_stopping=stopping)
    last = model.history[-1]
    parts = last["validation_critic_loss"] + last["validation_generator_loss"]
    assert last["validation_loss"] == pytest.approx(parts, rel=1e-5)

    def eval_step(module: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(module(batch["features"]), batch["label"])

    own = fit(table(), **GOOD | HERE, validation=0.25, eval_step=eval_step)
    assert "validation_critic_loss" not in own.history[-1]


class Killed(Callback):
    """A callback that kills rank 1 at a step, once."""

    def __init__(self, place: Path, step: int) -> None:
        self.place, self.step = str(place), step

    def on_step_end(self, state: TrainState) -> None:
        assert sorted(state.optimizer) == ["critic", "generator"]
        if state.step == self.step and state.rank == 1:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.place}/killed", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_two_ranks_compute_what_one_does_also_after_a_loss(tmp_path: Path) -> None:
    one = fit(table(), **GOOD | HERE)
    shared = GOOD | DRIVER | {"batch_size": 4}
    whole = fit(table(), **shared)
    again = fit(
        table(),
        **shared,
        checkpoint_every=1,
        retries=1,
        callbacks=[Killed(tmp_path, 4)],
        run_dir=str(tmp_path / "run"),
    )
    assert (tmp_path / "killed").exists()
    for name, mine in whole.module.named_parameters():
        torch.testing.assert_close(mine, one.module.get_parameter(name), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(again.module.get_parameter(name), mine, rtol=0, atol=0)
    for name in ("loss", "critic_loss", "generator_loss"):
        assert [e[name] for e in again.history] == [e[name] for e in whole.history]
        assert [e[name] for e in whole.history] == pytest.approx([e[name] for e in one.history], rel=1e-5)
    other = {
        "optimizer": lambda module: {"critic": two(module)["critic"], "gen": two(module)["generator"]},
        "epochs": 3,
    }
    with pytest.raises(BadSetting, match="optimizer: 'critic: Adam, gen: SGD', was 'critic: Adam, generator: SGD'"):
        fit(table(), **shared | other, run_dir=str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation": 2}, "gradient_accumulation=2 does not go with several optimizers"),
        ({"precision": "fp16"}, "precision='fp16' does not go with several optimizers"),
        ({"compile": True}, "compile=True does not go with several optimizers"),
        ({"lr_scheduler": lambda o: None}, "lr_scheduler=.* does not go with several optimizers"),
        ({"metrics": [nn.functional.l1_loss]}, "metrics=.* does not go with several optimizers"),
        ({"ddp_options": {"comm_hook": "fp16"}}, "ddp_options=.* does not go with .*Leave out comm_hook"),
        ({"optimizer": lambda module: torch.optim.SGD(module.parameters(), 0.1)}, "go together"),
        ({"optimizer": lambda p: torch.optim.SGD(p, 0.1)}, "returned a SGD, and train_step takes module, batch, opt"),
        ({"train_step": lambda module, batch: module(batch["features"]).mean()}, "returned a dict, and train_step"),
        ({"optimizer": lambda module: {"a": torch.optim.SGD(module.parameters(), 0.1), "b": 1}}, "must return one"),
        (
            {"optimizer": lambda module: {"validation": torch.optim.SGD(module.parameters(), 0.1)}},
            "another one than 'validation'",
        ),
        (
            {"optimizer": lambda module: {n: torch.optim.SGD(module.critic.parameters(), 0.1) for n in "ab"}},
            r"'critic\.0\.weight' is in the optimizers 'a' and 'b'",
        ),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        fit(table(), **GOOD | HERE | changes)
