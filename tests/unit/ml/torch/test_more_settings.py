"""Several labels, a step of its own for validation, initial weights, callbacks at steps, and an optimizer by names."""

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

import tritium as tr
from tritium.errors import BadData, BadRow, BadSetting
from tritium.ml import Callback, TorchModel, TrainState, fit
from tritium.ml.torch.losses import WeightedMean

ROWS = 48
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}
DRIVER: dict[str, Any] = {**HERE, "on": "driver"}


def table() -> pa.Table:
    random = np.random.default_rng(2)
    x = random.normal(size=(ROWS, 3))
    return pa.table({f"x{i}": x[:, i] for i in range(3)} | {"y": x[:, 0] - x[:, 1], "kind": np.arange(ROWS) % 3})


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


GOOD: dict[str, Any] = {
    "model": net,
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.05),
    "feature_cols": ["x0", "x1", "x2"],
    "label_cols": ["y"],
    "batch_size": 16,
}


class Two(nn.Module):
    """A number and scores of three classes, as a dict by the labels' names, or as a tuple."""

    def __init__(self, named: bool = True) -> None:
        super().__init__()
        self.number, self.kind, self.named = nn.Linear(3, 1), nn.Linear(3, 3), named

    def forward(self, x: torch.Tensor) -> Any:
        found = {"number": self.number(x), "kind": self.kind(x)}
        return found if self.named else tuple(found.values())


LABELS: dict[str, Any] = {
    "label_cols": {"number": ["y"], "kind": "kind"},
    "loss": {"number": nn.MSELoss(), "kind": nn.CrossEntropyLoss()},
    "loss_weights": {"kind": 0.5},
    "shuffle": False,
    "seed": 4,
}


class TestSeveralLabels:
    @pytest.mark.parametrize("named", [True, False])
    def test_the_sum_of_weighted_losses_is_minimised(self, named: bool) -> None:
        model = fit(table(), **GOOD | HERE | LABELS | {"model": lambda: Two(named), "epochs": 2})
        torch.manual_seed(0)
        by_hand, rows = fit(table(), **GOOD | HERE | LABELS | {"model": lambda: Two(named)}).module, table()
        x = torch.tensor(np.stack([rows[f"x{i}"] for i in range(3)], 1), dtype=torch.float32)
        y, kind = (
            torch.tensor(rows["y"].to_numpy(), dtype=torch.float32)[:, None],
            torch.tensor(rows["kind"].to_numpy()),
        )
        optimizer = torch.optim.SGD(by_hand.parameters(), 0.05)
        for start in range(0, ROWS, 16):
            part = slice(start, start + 16)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(by_hand.number(x[part]), y[part])
            loss = loss + 0.5 * nn.functional.cross_entropy(by_hand.kind(x[part]), kind[part])
            loss.backward()
            optimizer.step()
        for mine, theirs in zip(model.module.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert [o.name for o in model.signature.outputs] == (["number", "kind"] if named else ["output_0", "output_1"])

    def test_a_function_of_all_labels_and_a_metric(self) -> None:
        def loss(output: Any, labels: Any) -> torch.Tensor:
            return nn.functional.mse_loss(output["number"], labels["number"]) + nn.functional.cross_entropy(
                output["kind"], labels["kind"]
            )

        def accuracy(output: Any, labels: Any) -> torch.Tensor:
            return (output["kind"].argmax(1) == labels["kind"]).float().mean()

        changes = {"loss": loss, "loss_weights": None, "metrics": [accuracy], "epochs": 2, "model": Two}
        model = fit(table(), **GOOD | HERE | LABELS | changes)
        assert 0 <= model.history[-1]["accuracy"] <= 1

    def test_weights_of_rows(self) -> None:
        rows = table().append_column("w", pa.array([0.0, 1.0] * (ROWS // 2)))
        given = fit(rows, **GOOD | HERE | LABELS | {"model": Two, "weight_col": "w"})
        changed = rows.set_column(3, "y", pa.array(np.where(np.arange(ROWS) % 2, rows["y"], 99.0)))
        other = fit(changed, **GOOD | HERE | LABELS | {"model": Two, "weight_col": "w"})
        for mine, theirs in zip(given.module.parameters(), other.module.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"loss": nn.MSELoss(), "loss_weights": None}, BadSetting, r"has 2 labels \('number', 'kind'\), and loss="),
            (
                {"loss": {"number": nn.MSELoss()}, "loss_weights": None},
                BadSetting,
                "loss has none for the label 'kind'",
            ),
            ({"loss_weights": {"kid": 1.0}}, BadSetting, r"loss_weights names 'kid'.*Did you mean 'kind'"),
            ({"loss_weights": {"kind": "much"}}, BadSetting, "must be a number"),
            ({"label_cols": ["y"]}, BadSetting, "loss is a mapping, and label_cols is not"),
            ({"model": lambda: nn.Linear(3, 1)}, BadData, "returns a Tensor. Let forward return a dict"),
            ({"label_cols": {"number": ["y"], "weight": "kind"}}, BadSetting, "names a label 'weight'"),
        ],
    )
    def test_what_does_not_go_together(self, changes: dict[str, Any], error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            fit(table(), **{**GOOD, **HERE, **LABELS, "model": Two, **changes})

    def test_a_class_beyond_the_scores_is_named_by_its_column(self) -> None:
        rows = table().set_column(4, "kind", pa.array(np.arange(ROWS) % 5))
        with pytest.raises(BadRow, match="label column 'kind' holds the class"):
            fit(rows, **GOOD | HERE | LABELS | {"model": Two})


class TestInitialWeights:
    def test_of_a_model_a_path_a_module_and_a_state(self, tmp_path: Path) -> None:
        first = fit(table(), **GOOD | HERE, epochs=3)
        first.save(str(tmp_path / "first"))
        continued = []
        for given in (first, TorchModel(first), str(tmp_path / "first"), first.module, first.module.state_dict()):
            model = fit(table(), **GOOD | HERE, initial_weights=given, seed=9, shuffle=False)
            continued.append([w.detach().clone() for w in model.module.parameters()])
        for other in continued[1:]:
            for mine, theirs in zip(continued[0], other, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        fresh = fit(table(), **GOOD | HERE, seed=9, shuffle=False)
        assert fresh.history[0]["loss"] > fit(table(), **GOOD | HERE, initial_weights=first, seed=9).history[0]["loss"]

    def test_those_that_are_missing_stay_and_are_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        given = {"0.weight": torch.zeros(4, 3)}
        settings = GOOD | HERE | {"progress": True, "optimizer": lambda p: torch.optim.SGD(p, 0.0)}
        model = fit(table(), **settings, initial_weights=given)
        assert model.module[0].weight.eq(0).all()
        assert model.module[2].weight.ne(0).all()
        said = "".join(capsys.readouterr())
        assert "3 of the module's 4 weights are not in initial_weights, and start as made: 0.bias, 2.weight" in said

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"9.weight": torch.zeros(1)}, "'9.weight' is none of the module's"),
            ({"0.weight": torch.zeros(2, 2)}, r"'0.weight' is \[2, 2\], and \[4, 3\] in the module"),
            (7, "must be a trained model, the path of a saved one"),
        ],
    )
    def test_what_does_not_fit(self, given: Any, message: str) -> None:
        with pytest.raises(BadSetting, match=message):
            fit(table(), **GOOD | HERE, initial_weights=given)


def test_a_step_of_its_own_for_validation() -> None:
    def eval_step(module: Any, batch: Any) -> torch.Tensor:
        assert not module.training
        return (module(batch["features"]) - batch["label"]).abs().mean() + 100

    model = fit(table(), **GOOD | HERE, validation=0.25, eval_step=eval_step)
    assert model.history[0]["validation_loss"] > 100 > model.history[0]["loss"]
    with pytest.raises(BadSetting, match="eval_step is the step for validation, and there is none"):
        fit(table(), **GOOD | HERE, eval_step=eval_step)
    with pytest.raises(BadSetting, match=r"eval_step=.* takes batch; it is called with \(module, batch\)"):
        fit(table(), **GOOD | HERE, validation=0.25, eval_step=lambda batch: 0)


def test_weights_of_classes_in_float64() -> None:
    """The loss of the validation is computed in the type of the module."""
    rows, held = table(), np.arange(ROWS) % 4 == 0
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
    model = fit(
        rows.append_column("held", pa.array(held)),
        **GOOD | HERE | {"label_cols": "kind", "loss": loss, "model": lambda: nn.Linear(3, 3).double()},
        transform=lambda x: {"features": x["features"].double()},
        validation="held",
    )
    x = torch.tensor(rows.select(["x0", "x1", "x2"]).to_pandas().to_numpy("float32")[held]).double()
    with torch.no_grad():
        expected = loss(model.module(x), torch.tensor(rows["kind"].to_numpy()[held]))
    assert model.history[0]["validation_loss"] == pytest.approx(expected.item(), rel=1e-12)


def test_weights_of_classes_that_a_callback_changes() -> None:
    loss, label = nn.CrossEntropyLoss(weight=torch.ones(3)), torch.tensor([0, 2, 2])
    mean = WeightedMean(loss)
    assert mean.weights(label) == 3
    loss.weight = torch.tensor([1.0, 1.0, 4.0])
    assert mean.weights(label) == 9
    output = torch.randn(3, 3)
    torch.testing.assert_close((mean.sum(output, label) / mean.weights(label)).float(), loss(output, label))


def test_groups_of_parameters_by_their_names() -> None:
    def optimizer(module: Any) -> Any:
        return torch.optim.SGD([{"params": module[0].parameters(), "lr": 0.0}, {"params": module[2].parameters()}], 0.1)

    start = fit(table(), **GOOD | HERE | {"optimizer": lambda p: torch.optim.SGD(p, 0.0)})
    model = fit(table(), **GOOD | HERE | {"optimizer": optimizer})
    assert model.module[0].weight.equal(start.module[0].weight)
    assert not model.module[2].weight.equal(start.module[2].weight)


def test_a_model_that_cannot_run_on_the_driver() -> None:
    class OnlyInRanks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tr.world().shard("train")
            return super().forward(x)

    with pytest.raises(BadData, match="forward can't take these features"):
        fit(table(), **GOOD | HERE | {"model": lambda: OnlyInRanks(3, 1)})
    assert fit(table(), **GOOD | HERE | {"model": lambda: OnlyInRanks(3, 1)}, check="off").history


class Counts(Callback):
    """A callback that counts steps, and whose rank 1 is killed at the fifth, once."""

    def __init__(self, place: str) -> None:
        self.place, self.steps, self.losses = place, 0, 0

    def on_step_end(self, state: TrainState) -> None:
        assert state.loss.ndim == 0
        self.steps += 1
        self.losses += bool(torch.isfinite(state.loss))
        if self.steps == 5 and state.rank == 1:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.place}/killed", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, state: TrainState) -> None:
        assert state.step == self.steps, "each step is seen once, also after a loss"
        state.history[-1]["steps"] = self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.losses = state["steps"], state["losses"]


@pytest.mark.processes
def test_the_state_of_a_callback_at_steps_is_in_checkpoints(tmp_path: Path) -> None:
    settings = GOOD | DRIVER | {"batch_size": 4, "ranks": 2, "retries": 1, "checkpoint_every": 1, "epochs": 2}
    model = fit(table(), **settings, callbacks=[Counts(str(tmp_path))], run_dir=str(tmp_path / "run"))
    assert (tmp_path / "killed").exists()
    assert [entry["steps"] for entry in model.history] == [6, 12]
