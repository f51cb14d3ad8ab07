"""`precision="fp16"`: the scaled loss, steps that are left out, and a training that continues."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from tritium.errors import TrainingDiverged
from tritium.ml import Callback, TrainState, fit
from tritium.ml.torch.optimizer import LossScale

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}
DRIVER: dict[str, Any] = {**HERE, "on": "driver", "ranks": 2}
STEPS = 12


def table() -> pa.Table:
    x = np.random.default_rng(2).normal(size=(48, 3))
    return pa.table({f"x{i}": x[:, i] for i in range(3)} | {"y": x[:, 0] - x[:, 1]})


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


GOOD: dict[str, Any] = {
    "model": net,
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.05),
    "feature_cols": ["x0", "x1", "x2"],
    "label_cols": ["y"],
    "batch_size": 4,
    "precision": "fp16",
}


def steep(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients, scaled by 65,536, are infinite in float16."""
    return 30 * nn.functional.mse_loss(output, label)


def flat(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients can be scaled by 65,536 in float16."""
    return 0.1 * nn.functional.mse_loss(output, label)


class Seen(Callback):
    """A callback that records what the module computes in, and how the weights change."""

    def on_train_start(self, state: TrainState) -> None:
        self.kinds: set[str] = set()
        self.changed, self.before = 0, self.weights(state)
        state.module[0].register_forward_hook(lambda _, __, output: self.kinds.add(str(output.dtype)))

    def weights(self, state: TrainState) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in state.module.parameters()])

    def on_step_end(self, state: TrainState) -> None:
        now = self.weights(state)
        self.changed += not torch.equal(now, self.before)
        self.before = now

    def on_epoch_end(self, state: TrainState) -> None:
        state.history[-1] |= {"kinds": sorted(self.kinds), "changed": self.changed, "steps": state.step}


def test_it_computes_in_float16_and_learns_what_float32_does() -> None:
    settings = GOOD | HERE | {"loss": flat, "optimizer": lambda p: torch.optim.SGD(p, 0.5), "epochs": 3}
    half = fit(table(), **settings, validation=0.2, callbacks=[Seen()])
    whole = fit(table(), **settings | {"precision": "fp32"}, validation=0.2)
    assert [e["steps_skipped"] for e in half.history] == [0, 0, 0]
    assert half.history[-1]["kinds"] == ["torch.float16"]
    for name in ("loss", "validation_loss"):
        assert [e[name] for e in half.history] == pytest.approx([e[name] for e in whole.history], rel=0.02)
        assert half.history[-1][name] != whole.history[-1][name]
    assert all(p.dtype == torch.float32 for p in half.module.parameters())
    assert "steps_skipped" not in whole.history[-1]


def test_steps_that_are_left_out_are_counted_and_told_and_nothing_else_is(capsys: pytest.CaptureFixture[str]) -> None:
    settings = GOOD | HERE | {"loss": steep, "progress": True, "optimizer": lambda p: torch.optim.SGD(p, 0.001)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler is stepped before the optimizer ever was
        model = fit(
            table(),
            **settings,
            callbacks=[Seen()],
            clip_grad_norm=10.0,
            lr_scheduler=lambda o, steps: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.5, steps),
        )
    entry = model.history[0]
    assert 0 < entry["steps_skipped"] < STEPS
    assert entry["changed"] == STEPS - entry["steps_skipped"]
    assert entry["steps"] == STEPS
    assert entry["learning_rate"] == pytest.approx(0.0005), "as the schedule of all steps"
    said = "".join(capsys.readouterr())
    assert f"{entry['steps_skipped']} of {STEPS} optimizer steps of epoch 1 were skipped" in said


def test_clipping_is_of_gradients_that_are_not_scaled() -> None:
    settings = GOOD | HERE | {"optimizer": lambda p: torch.optim.SGD(p, 1.0), "epochs": 1}
    start = fit(table(), **settings | {"optimizer": lambda p: torch.optim.SGD(p, 0.0)})
    model = fit(table(), **settings, clip_grad_norm=1e-3)
    moved = [a - b for a, b in zip(model.module.parameters(), start.module.parameters(), strict=True)]
    norm = torch.nn.utils.get_total_norm([m.detach() for m in moved]).item()
    assert 1e-4 < norm <= STEPS * 1.001e-3


def infinite(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return a finite loss whose derivative is not: that of a root at zero."""
    return nn.functional.mse_loss(output, label) + torch.sqrt(0 * output.float()).mean()


def test_gradients_that_no_factor_makes_finite_are_divergence() -> None:
    with pytest.raises(TrainingDiverged, match=r"norm of the gradients.*epoch 2, step 5.*above 65,504 is infinite"):
        fit(table(), **GOOD | HERE | {"loss": infinite, "epochs": 3})  # 65,536 is 2 ** 16: 16 steps are left out


def test_a_loss_that_is_infinite_is_divergence() -> None:
    with pytest.raises(TrainingDiverged, match=r'The loss is NaN or infinite: epoch 1, step 1.*precision="bf16"'):
        fit(table(), **GOOD | HERE | {"loss": lambda output, label: (output * 1e6).mean()})


def test_parameters_that_the_optimizer_does_not_hold_are_unscaled_too() -> None:
    held, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    optimizer, scale = torch.optim.SGD(held.parameters(), 0.1), LossScale(torch.device("cpu"))
    x = torch.ones(1, 2)
    scale.scaled((held(x) + other(x)).sum()).backward()
    scale.unscale(optimizer, list(other.parameters()))
    assert held.weight.grad.tolist() == other.weight.grad.tolist() == [[1.0, 1.0]]
    assert not scale.step(optimizer)


class Killed(Callback):
    """A callback that kills rank 1 at a step, once."""

    def __init__(self, place: Path, step: int) -> None:
        self.place, self.step = str(place), step

    def on_step_end(self, state: TrainState) -> None:
        if state.step == self.step and state.rank == 1:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.place}/killed", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_two_ranks_leave_out_the_same_steps_and_continue_with_the_same_factor(tmp_path: Path) -> None:
    settings = GOOD | DRIVER | {"loss": steep, "optimizer": lambda p: torch.optim.SGD(p, 0.001), "epochs": 2}
    whole = fit(table(), **settings)
    again = fit(
        table(),
        **settings,
        checkpoint_every=1,
        retries=1,
        callbacks=[Killed(tmp_path, 4)],
        run_dir=str(tmp_path / "run"),
    )
    assert (tmp_path / "killed").exists()
    skipped = [e["steps_skipped"] for e in whole.history]
    assert skipped[0] > 0
    assert [e["steps_skipped"] for e in again.history] == skipped
    for mine, theirs in zip(again.module.parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
