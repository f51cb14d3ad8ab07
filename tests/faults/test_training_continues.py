"""A training that is interrupted and continues ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torchmetrics
from torch import nn

import tritium as tr
from tritium.errors import BadSetting, DataChanged, RankFailed
from tritium.ml import Callback, fit
from tritium.ml.settings import LABEL

ROWS = 90
RANK = "LOCAL_RANK"
MANY = int(os.environ.get("TRITIUM_FAULT_ROUNDS", "1")) > 1  # `make test` leaves some out


def table(rows: int = ROWS) -> pa.Table:
    random = np.random.default_rng(1)
    x = random.normal(size=(rows, 3))
    return pa.table({"id": np.arange(rows)} | {f"x{i}": x[:, i] for i in range(3)} | {"y": np.sin(x[:, 0]) + x[:, 1]})


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def die_once(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / "killed", os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)


def dying(folder: Path, epoch: int, step: int, rank: int) -> Callable[..., Any]:
    """Return a train step with the mean squared error, in which one rank is killed at this step, once."""

    def train_step(module: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if module.training and (batch.epoch, batch.step) == (epoch, step) and tr.world().rank == rank:
            die_once(folder)
        output = module(batch["features"])
        return nn.functional.mse_loss(output, batch[LABEL]), output

    return train_step


def steady(module: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output = module(batch["features"])
    return nn.functional.mse_loss(output, batch[LABEL]), output


OTHER_STEP: dict[str, Any] = {"if_code_changed": "continue"}  # it was begun with a step that dies


def train(run_dir: Path, frame: Any = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": net,
        "optimizer": lambda p: torch.optim.Adam(p, 3e-3),
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
        "train_step": steady,
        "checkpoint_every": 2,
    }
    return fit(table() if frame is None else frame, run_dir=str(run_dir), **(settings | changes))


def same(one: Any, other: Any) -> None:
    """Assert equality bit for bit, but for times."""
    for (name, a), (_, b) in zip(one.module.state_dict().items(), other.module.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    clock = ("seconds", "rows_per_second")
    histories = [[{k: v for k, v in entry.items() if k not in clock} for entry in m.history] for m in (one, other)]
    assert histories[0] == histories[1]


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text()))


MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "per-step scheduler, accumulation, clipping": {
        "lr_scheduler": lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=steps),
        "gradient_accumulation": 2,
        "clip_grad_norm": 1.0,
    },
    "metrics, validation, early stopping": {
        "metrics": {
            "mae": torchmetrics.MeanAbsoluteError(),
            "more": torchmetrics.MetricCollection([torchmetrics.R2Score(), torchmetrics.MeanSquaredError()]),
        },
        "validation": 0.3,
        "early_stopping": 2,
        "lr_scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    },
}


SIZES = [(1, "plain"), *((2, more) for more in MORE), (3, "plain")] + [(4, "plain")] * MANY
WITH_METRICS = pytest.mark.imports("torchmetrics")


@pytest.mark.parametrize(
    ("ranks", "more"), [pytest.param(*size, marks=[WITH_METRICS] * ("metrics" in MORE[size[1]])) for size in SIZES]
)
def test_killed_and_gone_on_is_as_never_interrupted_bit_for_bit(ranks: int, more: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", ranks=ranks, **MORE[more])
    step = dying(tmp_path, 2, 1, ranks - 1)  # the third save waits for the end of the first, so that one is there
    broken = train(tmp_path / "broken", ranks=ranks, **(MORE[more] | {"train_step": step}))
    assert (tmp_path / "killed").exists()
    (retry,) = report(tmp_path / "broken")["retries"]
    assert retry["start"] is not None
    assert "SIGKILL" in retry["reason"]
    same(whole, broken)


class DiesAfterAnEpoch(Callback):
    """A callback that kills the last rank once when an epoch has ended, and its last step is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_epoch_end(self, state: Any) -> None:
        tr.world().checkpoint.wait()
        if state.epoch == 2 and state.rank == state.size - 1:
            die_once(self.folder)


class Idle(nn.Module):
    """A module with a layer without input, so that DDP must look for parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.last, self.first = nn.Linear(3, 3), nn.Linear(16, 1), nn.Linear(3, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x).relu())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


@pytest.mark.parametrize("module", [normed] + [Idle] * MANY)
def test_an_epoch_that_was_saved_before_its_validation_ends_as_it_would_have(module: Any, tmp_path: Path) -> None:
    """BatchNorm has seen other rows on each rank, and validates each rank's rows with that."""
    settings = {"model": module, "train_step": None, "loss": nn.MSELoss(), "validation": 0.3, "remainder": "drop"}
    settings |= {"checkpoint_every": 1, "ranks": 3}
    whole = train(tmp_path / "whole", **settings)
    broken = train(tmp_path / "broken", **settings, callbacks=[DiesAfterAnEpoch(tmp_path)])
    (retry,) = report(tmp_path / "broken")["retries"]
    assert retry["start"] is not None
    same(whole, broken)


def test_every_row_counts_once_at_another_world_size(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        train(tmp_path / "run", retries=0, train_step=dying(tmp_path, 1, 4, 0))
    model = train(tmp_path / "run", ranks=3, **OTHER_STEP)
    assert [entry["rows"] for entry in model.history] == [ROWS] * 3
    notes = report(tmp_path / "run")["notes"]
    assert any(note.startswith("continues from the checkpoint of step") for note in notes), notes
    assert not any("starts over" in note for note in notes), notes


def test_the_same_run_directory_again_has_nothing_left_to_do_or_goes_on_for_more_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(tmp_path / "run")
    capsys.readouterr()
    again = train(tmp_path / "run", progress=True)
    same(first, again)
    line = f"the training in {tmp_path}/run has ended after 3 epochs: nothing is left to do, its model is returned"
    assert report(tmp_path / "run")["notes"][0] == line
    assert capsys.readouterr().out.splitlines()[0] == f"tritium: {line}"
    more = train(tmp_path / "run", epochs=5)
    same(train(tmp_path / "whole", epochs=5), more)
    assert (
        report(tmp_path / "run")["notes"][0]
        == f"a training in {tmp_path}/run continues: epoch 4 of 5, after step 18 in all"
    )


def test_another_training_in_the_same_run_directory_is_refused_before_anything_has_started(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, epochs=1)
    events = (run / "events.jsonl").read_bytes()
    other = {"feature_cols": ["x0", "x1"], "model": lambda: nn.Linear(2, 1)}
    with pytest.raises(BadSetting) as caught:
        train(run, batch_size=4, optimizer=lambda p: torch.optim.SGD(p, 0.1), **other)
    text = str(caught.value)
    assert "batch_size: 4, was 8" in text
    assert "column features: 'float32 of x0, x1', was 'float32 of x0, x1, x2'" in text
    assert "optimizer: 'SGD', was 'Adam'" in text
    assert "weights 0.weight: None, was 'torch.float32 [16, 3]'" in text
    assert "weights weight: 'torch.float32 [1, 2]', was None" in text
    assert "Name another run_dir to train from the beginning" in text
    assert (run / "events.jsonl").read_bytes() == events

    def only_in_ranks(p: Any) -> Any:
        if RANK not in os.environ:
            raise ImportError("a library that only the ranks have")
        return torch.optim.SGD(p, 0.1)

    with pytest.raises(BadSetting, match="optimizer: 'SGD', was 'Adam'"):
        train(run, optimizer=only_in_ranks)
    assert (run / "events.jsonl").read_bytes() != events, "what this machine can't tell, the ranks do"


def test_without_checkpoints_of_its_own_it_is_refused_too_or_says_that_it_starts_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, epochs=1)
    before = {path: path.read_bytes() for path in sorted((run / "checkpoints").rglob("*")) if path.is_file()}
    with pytest.raises(BadSetting, match="batch_size: 4, was 8"):
        train(run, batch_size=4, checkpoint_every=None)
    model = train(run, epochs=1, checkpoint_every=None)
    assert len(model.history) == 1
    said = next(note for note in report(run)["notes"] if "starts over, as checkpoint_every is None" in note)
    assert "after step 6, are neither read nor replaced" in said
    assert {path: path.read_bytes() for path in sorted((run / "checkpoints").rglob("*")) if path.is_file()} == before


def test_checkpoints_of_a_function_of_ones_own_are_refused_too(tmp_path: Path) -> None:
    def save() -> None:
        tr.world().checkpoint.save({"w": 1.0}, 1)

    tr.launch(save, on="here", run_dir=str(tmp_path / "run"), progress=False)
    with pytest.raises(BadSetting, match=r"world\.checkpoint\.save in a function that was launched"):
        train(tmp_path / "run", on="here", ranks=1)


def test_other_rows_are_refused_and_the_same_rows_in_another_order_start_their_epoch_over(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        train(tmp_path / "run", retries=0, train_step=dying(tmp_path, 1, 4, 0))
    with pytest.raises(DataChanged, match="80 rows, were 90"):
        train(tmp_path / "run", table()[:80], **OTHER_STEP)
    model = train(tmp_path / "run", table().sort_by([("id", "descending")]), **OTHER_STEP)
    assert [entry["rows"] for entry in model.history] == [ROWS] * 3
    assert any("so epoch 2 starts over" in note for note in report(tmp_path / "run")["notes"])


def test_a_row_key_makes_another_order_exact(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", row_key="id")
    with pytest.raises(RankFailed, match="SIGKILL"):
        train(tmp_path / "run", retries=0, row_key="id", train_step=dying(tmp_path, 1, 4, 0))
    same(whole, train(tmp_path / "run", table().sort_by([("id", "descending")]), row_key="id", **OTHER_STEP))


def test_without_checkpoints_a_retry_starts_from_the_beginning_and_says_so(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", checkpoint_every=None)
    broken = train(tmp_path / "broken", checkpoint_every=None, train_step=dying(tmp_path, 1, 4, 0))
    same(whole, broken)
    notes = report(tmp_path / "broken")["notes"]  # on a busy machine also which rank is missing
    assert any(note.endswith("from the beginning: no checkpoint yet") for note in notes), notes
