"""`strategy="fsdp"`: the weights of one process on sharded ranks, what is refused, and a training that continues."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tritium.errors import BadSetting, EmptyShard, RankFailed, Stalled
from tritium.gang.driver.attempt import imports_of
from tritium.ml import Callback, EarlyStopping, TrainState, fit
from tritium.ml.torch.backend import TorchBackend
from tritium.ml.torch.fsdp import units_of

ROWS = 48
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}
DRIVER: dict[str, Any] = {**HERE, "on": "driver", "ranks": 2, "strategy": "fsdp"}


def table(rows: int = ROWS) -> pa.Table:
    x = np.random.default_rng(2).normal(size=(rows, 3))
    return pa.table({f"x{i}": x[:, i] for i in range(3)} | {"y": x[:, 0] - x[:, 1], "k": np.arange(rows) % 3})


class Net(nn.Module):
    """Widths that 2 does not divide, a list of layers, buffers, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(3)])
        self.layers[2][2].weight = self.layers[1][2].weight
        self.norm, self.last = nn.LayerNorm(7), nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.score(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


def own_step(module: Any, batch: Any) -> torch.Tensor:
    x = module.first(batch["features"])
    for layer in module.layers:
        x = x + layer(x)
    return (module.score(x) - batch["label"]).square().mean()


GOOD: dict[str, Any] = {
    "model": Net,
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.Adam(p, 0.05),
    "feature_cols": ["x0", "x1", "x2"],
    "label_cols": ["y"],
    "batch_size": 4,
    "epochs": 2,
    "shuffle": False,
}


@pytest.mark.processes
def test_what_optimizers_and_fsdp_need_is_imported_before_ranks_are_forked() -> None:
    (module,) = imports_of(TorchBackend().train, rows=False)
    code = f"import sys, {module}; print('torch._dynamo' in sys.modules, 'torch.distributed.fsdp' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True True\n"


class Shares(Callback):
    """A callback that writes how many numbers of the weights and of the optimizer's state a rank holds."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def on_train_end(self, state: TrainState) -> None:
        assert all(isinstance(parameter, DTensor) for parameter in state.module.parameters())
        weights = sum(parameter.to_local().numel() for parameter in state.module.parameters())
        kept = [value for one in state.optimizer.state.values() for value in one.values() if isinstance(value, DTensor)]
        Path(f"{self.place}/{state.rank}").write_text(f"{weights} {sum(value.to_local().numel() for value in kept)}")


class Killed(Callback):
    """A callback that kills rank 1 at a step, once."""

    def __init__(self, place: Path, step: int) -> None:
        self.place, self.step = str(place), step

    def on_step_end(self, state: TrainState) -> None:
        if state.step == self.step and state.rank == 1:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.place}/killed", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)


def differ(one: Any, other: Any) -> float:
    pairs = zip(one.module.state_dict().items(), other.module.state_dict().items(), strict=True)
    assert all(name == same for (name, _), (same, _) in pairs)
    states = one.module.state_dict().values(), other.module.state_dict().values()
    return max(float((a - b).abs().max()) for a, b in zip(*states, strict=True))


def learned(model: Any) -> list[dict[str, Any]]:
    """Return the history without times."""
    return [{k: v for k, v in e.items() if k not in ("seconds", "rows_per_second")} for e in model.history]


@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"clip_grad_norm": 0.5, "validation": 0.25}, id="clip_grad_norm"),
        pytest.param({"train_step": own_step, "gradient_accumulation": 3, "validation": 0.25}, id="train_step"),
        pytest.param({"precision": "fp16"}, id="fp16"),
    ],
)
def test_sharded_ranks_learn_what_whole_ones_do(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = fit(table(), **GOOD | DRIVER | settings | {"strategy": "ddp"})
    sharded = fit(table(), **GOOD | DRIVER | settings, callbacks=[Shares(tmp_path)])
    for before, now in zip(learned(whole), learned(sharded), strict=True):
        assert now == pytest.approx(before, rel=1e-5)
    assert differ(whole, sharded) < 1e-5
    shares = [[int(n) for n in (tmp_path / str(rank)).read_text().split()] for rank in range(2)]
    total = sum(parameter.numel() for parameter in Net().parameters())
    assert sum(weights for weights, _ in shares) == total
    assert all(0 < weights < 0.65 * total for weights, _ in shares)
    assert [2 * weights for weights, _ in shares] == [kept for _, kept in shares]
    rows = table().select(["x0", "x1", "x2"])
    assert np.allclose(sharded.predict(rows), whole.predict(rows), atol=1e-4)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_training_continues_with_its_ranks_with_others_and_whole(tmp_path: Path) -> None:
    settings = GOOD | DRIVER | {"early_stopping": EarlyStopping(patience=9, monitor="loss"), "epochs": 3}
    one = fit(table(), **settings | {"ranks": 1, "batch_size": 8})
    whole = fit(table(), **settings)
    kept = {"checkpoint_every": 1, "retries": 1}
    for place in ("sharded", "whole"):
        (tmp_path / place).mkdir()
    again = fit(table(), **settings | kept, run_dir=str(tmp_path / "sharded"), callbacks=[Killed(tmp_path, 9)])
    assert (tmp_path / "killed").exists()
    assert differ(whole, again) == 0.0
    assert learned(again) == learned(whole)
    assert differ(whole, one) < 1e-4
    files = [list((tmp_path / "sharded").rglob(f"own-{rank}.safetensors")) for rank in range(2)]
    sizes = [sum(path.stat().st_size for path in each) for each in files]
    assert 0 < sizes[1] < sizes[0]
    fit(table(), **settings | kept | {"strategy": "ddp"}, run_dir=str(tmp_path / "whole"))
    # From two parts to one rank, to three parts, and to two ranks that hold all.
    for epochs, ranks, strategy in ((4, 1, "fsdp"), (5, 3, "fsdp"), (6, 2, "ddp")):
        more = settings | kept | {"epochs": epochs, "ranks": ranks}
        sharded = fit(table(), **more | {"strategy": strategy}, run_dir=str(tmp_path / "sharded"))
        plain = fit(table(), **more | {"strategy": "ddp"}, run_dir=str(tmp_path / "whole"))
        assert len(sharded.history) == epochs
        assert differ(sharded, plain) < 1e-4, strategy
        assert sharded.history[-1]["loss"] == pytest.approx(plain.history[-1]["loss"], rel=1e-4)


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 1))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.factor = nn.Linear(3, 1), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x) * self.factor


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "fsdp2"}, "strategy='fsdp2' is unknown; choose one of 'ddp', 'fsdp'"),
        ({"ddp_options": {"bucket_cap_mb": 5}}, r"ddp_options\['bucket_cap_mb'\] is DDP's, and does not go with"),
        ({"compile": True}, "compile=True does not go with strategy='fsdp'"),
        ({"model": Scaled}, r"'factor' is a parameter without dimensions, which strategy='fsdp' can't shard"),
        ({"model": sparse, "feature_cols": "k"}, "The embedding '0' has sparse gradients, which strategy='fsdp' can't"),
    ],
)
def test_what_is_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        fit(table(), **GOOD | DRIVER | settings)


class Inside(Net):
    """A module that uses a part of a layer, outside the layer's own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(nn.functional.linear(self.first(x), self.layers[0][2].weight @ self.layers[0][0].weight))


class Freezes(Callback):
    """A callback that freezes a layer when the training begins, and trains it again after an epoch."""

    def __init__(self, again: bool) -> None:
        self.again = again

    def on_train_start(self, state: TrainState) -> None:
        state.module.first.requires_grad_(False)

    def on_epoch_end(self, state: TrainState) -> None:
        if self.again:
            state.module.first.requires_grad_(True)


def by_rank(module: Any, batch: Any) -> torch.Tensor:
    """Call equal layers in another order on rank 1."""
    x = module.first(batch["features"])
    for layer in module.layers if torch.distributed.get_rank() == 0 else reversed(module.layers):
        x = x + layer(x)
    return (module.score(x) - batch["label"]).square().mean()


def left_out(module: Any, batch: Any) -> torch.Tensor:
    """Call no second layer on rank 1."""
    x = module.layers[0](module.first(batch["features"]))
    if torch.distributed.get_rank() == 0:
        x = module.layers[1](x)
    return (module.score(x) - batch["label"]).square().mean()


class Equal(Net):
    """Layers of equal shapes, each on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])


@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        pytest.param(
            {"callbacks": [Freezes(True)]},
            BadSetting,
            r"frozen or unfrozen layers after the first step \(2 tensors .*'first\.bias'.*on_train_start",
            id="unfrozen",
        ),
        pytest.param(
            {"model": Equal, "train_step": by_rank},
            BadSetting,
            "Rank 1 has not called the same layers in the same order as rank 0",
            id="another-order-on-a-rank",
        ),
        pytest.param(
            {"model": Equal, "train_step": left_out, "stall_timeout": 3, "retries": 0},
            Stalled,
            "hangs: step 1, no progress for",
            id="left-out-on-a-rank",
        ),
        pytest.param(
            {"model": Equal, "eval_step": by_rank, "validation": 0.25},
            BadSetting,
            "Rank 1 has not called the same layers in the same order as rank 0",
            id="another-order-in-validation",
        ),
        pytest.param(
            {"model": Inside}, BadSetting, r"a step uses them outside.*\n?.*Call the entry", id="part-of-a-layer"
        ),
        pytest.param(
            {"validation": "v", "rows": 1},
            EmptyShard,
            r"rank 0 has no row to validate on \(rows per rank: 0, 1\)",
            id="no-rows",
        ),
    ],
)
def test_what_only_a_rank_sees(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    rows = table()
    if settings.pop("rows", None):
        rows = rows.append_column("v", pa.array([i == 0 for i in range(ROWS)]))
    with pytest.raises((error, RankFailed), match=message) as caught:
        fit(rows, **GOOD | DRIVER | settings)
    assert isinstance(caught.value, error)


def sometimes(module: Any, batch: Any) -> torch.Tensor:
    """Use one layer of the list, and in one step another."""
    x = module.layers[1 if batch.step == 2 else 0](module.first(batch["features"]))
    return (module.last(x) - batch["label"]).square().mean()


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_steps_may_use_other_layers_where_all_ranks_do() -> None:
    settings = GOOD | DRIVER | {"model": Equal, "train_step": sometimes}
    sharded, whole = fit(table(), **settings), fit(table(), **settings | {"strategy": "ddp"})
    assert differ(sharded, whole) < 1e-5


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_layers_frozen_when_the_training_begins() -> None:
    settings = GOOD | DRIVER | {"callbacks": [Freezes(False)]}
    sharded, whole = fit(table(), **settings), fit(table(), **settings | {"strategy": "ddp"})
    assert differ(sharded, whole) < 1e-5
    assert torch.equal(sharded.module.first.weight, fit(table(), **settings | {"epochs": 1}).module.first.weight)


class Transformer(nn.Module):
    """An encoder of words, whose embedding is also its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(x)).mean(1))


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_transformer_with_tied_weights() -> None:
    words = np.random.default_rng(0).integers(0, 5, (ROWS, 6))
    rows = pa.table({"words": pa.array(words.tolist(), pa.list_(pa.int64(), 6)), "y": words[:, 0]})
    settings = GOOD | DRIVER | {"model": Transformer, "feature_cols": "words", "label_cols": "y"}
    settings |= {"loss": nn.CrossEntropyLoss(), "validation": 0.25}
    sharded, whole = fit(rows, **settings), fit(rows, **settings | {"strategy": "ddp"})
    assert differ(sharded, whole) < 1e-4
    assert sharded.module.head.weight is sharded.module.words.weight


def test_units_are_the_entries_of_lists_that_share_nothing() -> None:
    net = Net()
    assert units_of(net) == [net.layers[0]]
    blocks = [nn.Linear(2, 2) for _ in range(3)]
    nested = nn.Sequential(blocks[0], nn.Tanh(), nn.ModuleList([nn.ModuleDict({"a": blocks[1]}), blocks[2]]))
    assert units_of(nested) == blocks
    assert units_of(nn.Linear(2, 2)) == []


def test_one_rank_holds_all() -> None:
    one, plain = fit(table(), **GOOD | HERE | {"strategy": "fsdp"}), fit(table(), **GOOD | HERE)
    assert differ(one, plain) == 0.0
