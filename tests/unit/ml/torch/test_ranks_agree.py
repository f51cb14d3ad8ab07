"""All ranks train and validate the same model, whatever callbacks freeze and unfreeze during the training."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadSetting, RankFailed, RanksDiffer
from tritium.ml import Callback, EarlyStopping, fit
from tritium.ml.torch.ranks import checksum

ROWS = 60


def table(rows: int = ROWS) -> pa.Table:
    random = np.random.default_rng(3)
    x = random.normal(size=(rows, 3))
    held = random.uniform(size=rows) < 0.3
    return pa.table({f"x{i}": x[:, i] for i in range(3)} | {"y": np.sin(x[:, 0]) + x[:, 1], "held": held})


class Net(nn.Module):
    """A backbone that is frozen at first, and a head."""

    def __init__(self, frozen: bool = True, norm: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8) if norm else nn.Tanh())
        self.head = nn.Linear(8, 1)
        if frozen:
            self.backbone.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x))


class Unfreezes(Callback):
    """A callback that unfreezes the backbone after an epoch, later freezes the head, and keeps every rank's weights."""

    def __init__(self, after: int = 0, freeze_head: int | None = None, group: bool = False) -> None:
        self.after, self.freeze_head, self.group = after, freeze_head, group

    def on_train_start(self, state: Any) -> None:
        state.module.backbone.requires_grad_(False)

    def on_epoch_end(self, state: Any) -> None:
        if len(state.history) - 1 == self.after:
            state.module.backbone.requires_grad_(True)
            if self.group:
                state.optimizer.add_param_group({"params": list(state.module.backbone.parameters()), "lr": 1e-4})
        if len(state.history) - 1 == self.freeze_head:
            state.module.head.requires_grad_(False)
        weights = [p.detach().clone().tolist() for p in state.module.parameters()]
        state.history[-1]["weights"] = tr.world().gather(weights)


def train(run_dir: Path, frame: Any = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": nn.MSELoss(),
        "optimizer": lambda p: torch.optim.Adam(p, 0.01),
        "feature_cols": ["x0", "x1", "x2"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 3,
        "seed": 3,
        "verbose": False,
        "ranks": 2,
        "on": "driver",
        "progress": False,
        "output": "none",
        "checkpoint_every": None,
    }
    return fit(table() if frame is None else frame, run_dir=str(run_dir), **(settings | changes))


def flat(weights: list[Any]) -> torch.Tensor:
    return torch.cat([torch.tensor(part).flatten() for part in weights])


@pytest.mark.processes
@pytest.mark.parametrize("accumulation", [1, 2])
def test_layers_unfrozen_and_frozen_in_a_callback_are_trained_by_all_ranks_together(
    accumulation: int, tmp_path: Path
) -> None:
    settings = {"callbacks": [Unfreezes(0, freeze_head=1)], "epochs": 4, "shuffle": False}
    settings |= {"optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)}
    two = train(tmp_path / "two", gradient_accumulation=accumulation, batch_size=4 // accumulation, **settings)
    assert all(entry["weights"][0] == entry["weights"][1] for entry in two.history)
    alone = train(
        tmp_path / "one", ranks=1, gradient_accumulation=accumulation, batch_size=8 // accumulation, **settings
    )
    for pair, single in zip(two.history, alone.history, strict=True):
        # shuffle=False: the steps of two ranks take the rows that one takes, so their weights are one process's.
        torch.testing.assert_close(flat(pair["weights"][0]), flat(single["weights"][0]), rtol=1e-4, atol=1e-5)
    first, second, third, _ = (flat(entry["weights"][0]) for entry in two.history)
    backbone = slice(0, 32)
    assert torch.equal(first[backbone], flat([p.detach().tolist() for p in _begun().parameters()])[backbone])
    assert not torch.equal(second[backbone], first[backbone])
    assert torch.equal(third[32:], second[32:]), "the head is frozen again"


def _begun() -> Net:
    torch.manual_seed(3)
    return Net()


@pytest.mark.processes
def test_early_stopping_restores_the_best_weights_of_layers_that_were_unfrozen(tmp_path: Path) -> None:
    model = train(
        tmp_path / "run",
        callbacks=[Unfreezes(0)],
        epochs=8,
        optimizer=lambda p: torch.optim.Adam(p, 0.3),
        early_stopping=EarlyStopping(patience=2),
        validation="held",
    )
    losses = [entry["validation_loss"] for entry in model.history]
    best = losses.index(min(losses))
    assert all(entry["weights"][0] == entry["weights"][1] for entry in model.history)
    kept = [p.tolist() for p in model.module.parameters()]
    assert kept == model.history[best]["weights"][0]


class Kills(Unfreezes):
    """A callback that kills the last rank once, after this epoch, when its last step has been saved."""

    def __init__(self, folder: Path, at: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder, self.at = folder, at

    def on_epoch_end(self, state: Any) -> None:
        super().on_epoch_end(state)
        tr.world().checkpoint.wait()
        if len(state.history) - 1 == self.at and state.rank == state.size - 1 and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.parametrize("group", [False, True])
def test_gone_on_after_layers_were_unfrozen_is_as_never_interrupted(group: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 5, "checkpoint_every": 1, "ranks": 3}
    if group:
        settings["optimizer"] = lambda p: torch.optim.Adam([w for w in p if w.requires_grad], 0.01)
    whole = train(tmp_path / "whole", callbacks=[Unfreezes(1, group=group)], **settings)
    broken = train(tmp_path / "broken", callbacks=[Kills(tmp_path, 3, after=1, group=group)], **settings)
    (retry,) = json.loads((tmp_path / "broken" / "report.json").read_text())["retries"]
    assert retry["start"] is not None
    assert [e["weights"][0] for e in whole.history] == [e["weights"][0] for e in broken.history]
    for (name, a), (_, b) in zip(whole.module.state_dict().items(), broken.module.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.processes
def test_at_another_world_size_it_goes_on_with_the_layers_that_were_unfrozen(tmp_path: Path) -> None:
    settings = {"epochs": 4, "checkpoint_every": 1}
    with pytest.raises(RankFailed, match="SIGKILL"):
        train(tmp_path / "run", ranks=3, retries=0, callbacks=[Kills(tmp_path, 2, after=0)], **settings)
    model = train(tmp_path / "run", ranks=2, callbacks=[Unfreezes(0)], **settings)
    before, after = (flat(entry["weights"][0])[:32] for entry in model.history[-2:])
    assert not torch.equal(before, after), "the backbone is trained after the new start too"


class UnfreezesOnOneRank(Callback):
    def on_epoch_end(self, state: Any) -> None:
        if state.rank == 1:
            state.module.backbone[0].weight.requires_grad_(True)


@pytest.mark.processes
def test_layers_that_only_some_ranks_unfreeze_are_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(RanksDiffer, match=r"rank 1 trains 'backbone\.0\.weight', and rank 0 does not") as caught:
        train(tmp_path / "run", callbacks=[UnfreezesOnOneRank()])
    assert caught.value.ranks == [1]


def test_an_unfrozen_layer_that_no_group_of_the_optimizer_holds_is_an_error(tmp_path: Path) -> None:
    optimizer = lambda p: torch.optim.Adam([w for w in p if w.requires_grad], 0.01)  # noqa: E731
    with pytest.raises(BadSetting, match=r"'backbone\.0\.weight'.*no group of the optimizer.*add_param_group"):
        train(tmp_path / "run", on="here", ranks=1, optimizer=optimizer, callbacks=[Unfreezes(0)])


def test_weights_that_no_group_of_the_optimizer_holds_are_told_at_the_start(tmp_path: Path) -> None:
    train(
        tmp_path / "run",
        model=lambda: Net(frozen=False),
        optimizer=lambda p: torch.optim.Adam(list(p)[-2:], 0.01),
        on="here",
        ranks=1,
    )
    (note,) = json.loads((tmp_path / "run" / "report.json").read_text())["notes"]
    assert note.startswith("2 of 4 tensors of weights are in no group of the optimizer, and are not trained: ")


def unfreezing_step(module: Any, batch: Any) -> Any:
    inner = getattr(module, "module", module)
    if module.training and batch.step == 1:
        inner.backbone.requires_grad_(True)
    return nn.functional.mse_loss(module(batch["features"]), batch["label"])


@pytest.mark.processes
def test_a_layer_that_is_unfrozen_within_an_epoch_is_refused_at_that_step(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"'backbone\.0\.weight' was unfrozen within a step.*on_epoch_end"):
        train(tmp_path / "run", train_step=unfreezing_step, loss=None)


class Skips(nn.Module):
    """A module that leaves out its second layer in some steps, as LayerDrop does, after the dry run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(3, 1), nn.Linear(3, 1), 0

    def forward(self, x: Any) -> Any:
        self.calls += self.training
        return self.first(x) + (self.second(x) if self.calls % 3 else 0)


def skipping_step(module: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(module(batch["features"]), batch["label"])


@pytest.mark.processes
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_module_that_skips_layers_in_some_steps_is_told_to_take_a_train_step(
    accumulated: int, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"model": Skips, "gradient_accumulation": accumulated, "batch_size": 4}
    with pytest.raises(BadSetting, match=r"got no gradient in this step.*train_step=lambda module, batch: your_loss"):
        train(tmp_path / "plain", **changes)
    model = train(tmp_path / "step", **changes, loss=None, train_step=skipping_step)
    assert len(model.history) == 3


class Touches(Callback):
    """A callback that changes the weights of one rank."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end

    def on_epoch_end(self, state: Any) -> None:
        if not self.at_end and len(state.history) - 1 == 1 and state.rank == 1:
            state.module.head.bias.data += 0.25

    def on_train_end(self, state: Any) -> None:
        if self.at_end and state.rank == 1:
            state.module.head.bias.data += 0.25


@pytest.mark.processes
@pytest.mark.parametrize("at_end", [False, True])
def test_weights_that_differ_between_ranks_are_an_error_and_no_model(at_end: bool, tmp_path: Path) -> None:
    says = r"'head\.bias' is the same on ranks 0, 2, and another on rank 1 \(1 of \d+ tensors"
    with pytest.raises(RanksDiffer, match=says) as caught:
        train(tmp_path / "run", ranks=3, callbacks=[Touches(at_end)])
    assert (caught.value.ranks, caught.value.tensor) == ([1], "head.bias")


@pytest.mark.processes
def test_different_weights_can_be_allowed_and_the_model_has_those_of_rank_0(tmp_path: Path) -> None:
    same = train(tmp_path / "same", ranks=2)
    model = train(tmp_path / "run", ranks=2, callbacks=[Touches(at_end=True)], equal_weights=False)
    for name, value in same.module.state_dict().items():
        assert torch.equal(value, model.module.state_dict()[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_a_checksum_is_that_of_the_bits_wherever_they_lie(dtype: Any) -> None:
    for count in (1, 3, 8, 1001):
        whole = torch.randn(count + 1).to(dtype)
        part = whole[1:]
        assert checksum(part) == checksum(part.clone())
        assert checksum(part.reshape(1, -1).T) == checksum(part)
        other = part.clone()
        other[-1] = ~other[-1] if dtype == torch.bool else other[-1] + 1
        assert checksum(other) != checksum(part)


class ValidatesAgain(Callback):
    """A callback that computes, on one rank alone, the loss of its module over all validation rows."""

    def on_epoch_end(self, state: Any) -> None:
        held = table().filter(table()["held"])
        x = torch.tensor(np.stack([held[f"x{i}"] for i in range(3)], 1), dtype=torch.float32)
        y = torch.tensor(held["y"].to_numpy(), dtype=torch.float32)[:, None]
        with torch.no_grad():
            loss = nn.functional.mse_loss(state.module.eval()(x), y).item()
        state.history[-1]["each"] = tr.world().gather(loss)


@pytest.mark.processes
def test_the_history_validates_the_model_that_is_returned_with_its_buffers(tmp_path: Path) -> None:
    model = train(
        tmp_path / "run",
        model=lambda: Net(frozen=False, norm=True),
        validation="held",
        callbacks=[ValidatesAgain()],
        ranks=3,
        remainder="drop",
        batch_size=4,
    )
    for entry in model.history:
        assert entry["each"] == [entry["each"][0]] * 3
        assert entry["validation_loss"] == pytest.approx(entry["each"][0], rel=1e-6)
    held = table().filter(table()["held"])
    x = torch.tensor(np.stack([held[f"x{i}"] for i in range(3)], 1), dtype=torch.float32)
    y = torch.tensor(held["y"].to_numpy(), dtype=torch.float32)[:, None]
    returned = nn.functional.mse_loss(model.module(x), y).item()
    assert model.history[-1]["validation_loss"] == pytest.approx(returned, rel=1e-6)


class SlowThenKilled(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, state: Any) -> None:
        tr.world().checkpoint.wait()
        if state.rank == 0 and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def slow_step(module: Any, batch: Any) -> Any:
    if module.training:
        time.sleep(0.1)
    return nn.functional.mse_loss(module(batch["features"]), batch["label"])


class GathersHistory(Callback):
    def on_epoch_end(self, state: Any) -> None:
        each = tr.world().gather(dict(state.history[-1]))
        state.history[-1]["each"] = each


@pytest.mark.processes
def test_the_history_is_the_same_on_every_rank_its_seconds_too(tmp_path: Path) -> None:
    (entry,) = train(tmp_path / "run", epochs=1, callbacks=[GathersHistory()]).history
    assert entry["each"][0] == entry["each"][1]
    assert entry["rows_per_second"] == entry["rows"] / entry["seconds"]


@pytest.mark.processes
def test_the_rows_per_second_of_a_resumed_epoch_count_its_earlier_seconds(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "checkpoint_every": 1, "train_step": slow_step, "loss": None}
    model = train(tmp_path / "run", callbacks=[SlowThenKilled(tmp_path)], **settings)
    (retry,) = json.loads((tmp_path / "run" / "report.json").read_text())["retries"]
    assert retry["start"] is not None
    (entry,) = model.history
    assert entry["seconds"] > 0.35, "four steps, of which none was taken again"
    assert entry["rows_per_second"] == pytest.approx(ROWS / entry["seconds"])


def nan_at_first(output: torch.Tensor, label: torch.Tensor) -> float:
    """Compute a metric that is NaN in the first epoch of validation."""
    nan_at_first.calls = getattr(nan_at_first, "calls", 0) + 1  # type: ignore[attr-defined]
    return float("nan") if nan_at_first.calls == 1 else 1.0 / nan_at_first.calls  # type: ignore[attr-defined]


def test_a_first_epoch_that_is_not_a_number_is_not_the_best_for_ever(tmp_path: Path) -> None:
    """One batch of validation rows an epoch: the metric falls from the second epoch on."""
    model = train(
        tmp_path / "run",
        ranks=1,
        on="here",
        validation="held",
        batch_size=64,
        metrics={"m": nan_at_first},
        epochs=6,
        early_stopping=EarlyStopping(patience=2, monitor="validation_m"),
        callbacks=[Unfreezes(9)],
    )
    assert len(model.history) == 6
    assert [p.tolist() for p in model.module.parameters()] == model.history[-1]["weights"][0]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_no_number_is_never_better_and_anything_else_is_better_than_it(mode: Any) -> None:
    rule, nan = EarlyStopping(mode=mode), float("nan")
    assert not rule.better(nan, None)
    assert not rule.better(nan, 1.0)
    assert rule.better(1.0, nan)
    assert rule.better(1.0, None)


class Observes(nn.Module):
    """A module whose buffer is a running value of its input, in eval mode too, as a quantization observer's is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(), alpha=0.1)
        return self.layer(x)


@pytest.mark.processes
def test_buffers_that_change_in_eval_mode_are_those_of_rank_0(tmp_path: Path) -> None:
    model = train(tmp_path / "run", model=Observes, validation="held", epochs=2)
    assert len(model.history) == 2


class Remembers(nn.Module):
    """A module that keeps its last output, of as many rows as the batch has."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("last", torch.zeros(1, 1), persistent=persistent)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        out = self.layer(x)
        self.last = out.detach()
        self.calls += 1
        return out


@pytest.mark.processes
def test_a_buffer_of_as_many_rows_as_the_batch_is_none_of_the_model(tmp_path: Path) -> None:
    """Rows to validate on that do not divide evenly: the last batches of the two ranks differ in size."""
    settings: dict[str, Any] = {"frame": table(61), "validation": table(31), "epochs": 2}
    model = train(tmp_path / "run", model=lambda: Remembers(False), **settings)
    assert len(model.history) == 2
    with pytest.raises(RanksDiffer, match=r"buffer 'last' .*persistent=False") as caught:
        train(tmp_path / "kept", model=lambda: Remembers(True), **settings)
    assert caught.value.tensor == "last"


class Replaces(Callback):
    """A callback that adds a layer on one rank."""

    def on_epoch_end(self, state: Any) -> None:
        if state.rank == 1:
            state.module.register_buffer("more", torch.zeros(3))


@pytest.mark.processes
def test_ranks_whose_tensors_have_other_names_are_an_error_that_names_one(tmp_path: Path) -> None:
    with pytest.raises(RanksDiffer, match=r"'more' is none of rank 0's") as caught:
        train(tmp_path / "run", callbacks=[Replaces()])
    assert (caught.value.ranks, caught.value.tensor) == ([1], "more")
