"""LightningEstimator: two ranks learn what one process learns, also after a SIGKILL; what it refuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import fsspec
import lightning
import numpy as np
import pandas as pd
import pytest
import torch

import tritium as tr
from tritium.checkpoint.store import Store
from tritium.errors import BadData, BadSetting, TrainingDiverged
from tritium.frameworks.host_memory import HostMemory
from tritium.ml import EarlyStopping, LightningEstimator, TorchModel

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
ROWS = 103
QUIET: dict[str, Any] = {"progress": False, "output": "none", "verbose": False, "retries": 0}
TIMES = ("seconds", "rows_per_second", "rows_padded")


@pytest.fixture
def rows() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({f"x{i}": draw.normal(size=ROWS) for i in range(4)})
    frame["y"] = frame.x0 * 2 - frame.x1
    frame["c"] = (frame.y > 0).astype(int) + (frame.y > 1)
    frame["w"] = draw.uniform(0.1, 3, ROWS)
    frame["held"] = np.arange(ROWS) % 25 == 3  # 99 to train on: the ranks have unequally many
    return frame


class TwoInputs(lightning.LightningModule):
    """Two inputs, a weight, a scheduler of each step, and what it logs."""

    def __init__(self, rate: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.hidden = torch.nn.Linear(4, 8)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, a: Any, b: Any) -> Any:
        return self.out(torch.tanh(self.hidden(torch.cat([a, b], 1))))

    def _loss(self, batch: Any) -> Any:
        features, label, weight = batch
        errors = (self(**features) - label)[:, 0] ** 2
        return (errors * weight).mean(), errors.sqrt().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, error = self._loss(batch)
        self.log("error", error, on_epoch=True, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, error = self._loss(batch)
        self.log("validation_error", error)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.rate)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}]


class Dies(lightning.Callback):
    """A callback that kills the last rank once, in the middle of an epoch."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        world = tr.world()
        here = (trainer.current_epoch, batch_idx) == (1, 3) and world.rank == world.size - 1
        if here and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def fitted(rows: pd.DataFrame, **changes: Any) -> TorchModel:
    settings: dict[str, Any] = {
        "model": TwoInputs,
        "feature_cols": {"a": ["x0", "x1"], "b": ["x2", "x3"]},
        "label_cols": ["y"],
        "weight_col": "w",
        "validation": "held",
        "epochs": 3,
        "shuffle": False,
        "checkpoint_every": 1,
        "on": "here",
    }
    return LightningEstimator(**(settings | QUIET | changes)).fit(rows)


def assert_same(one: TorchModel, other: TorchModel, rows: pd.DataFrame, logged: float) -> None:
    np.testing.assert_allclose(other.predict(rows), one.predict(rows), rtol=1e-5, atol=2e-6)
    assert [set(entry) for entry in one.history] == [set(entry) for entry in other.history]
    for entry, again in zip(one.history, other.history, strict=True):
        for name in set(entry) - set(TIMES):
            exact = name not in ("error", "error_epoch", "validation_error")
            assert again[name] == pytest.approx(entry[name], rel=2e-5 if exact else logged), name


def test_two_ranks_of_which_one_is_killed_learn_what_one_process_learns(rows: pd.DataFrame, tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    one = fitted(rows, global_batch_size=16)
    ranks: dict[str, Any] = {"on": "driver", "ranks": 2, "global_batch_size": 16, "retries": 1}
    two = fitted(rows, callbacks=[Dies(mark)], **ranks)
    assert os.path.exists(mark)
    assert_same(one, two, rows, logged=0.2)
    names = {"loss", "error_epoch", "validation_loss", "validation_error", "learning_rate"}
    assert names <= set(one.history[-1])
    assert [entry["rows"] for entry in two.history] == [99, 99, 99]
    assert one.history[-1]["loss"] < one.history[0]["loss"]


class Noisy(TwoInputs):
    """Dropout and BatchNorm: random numbers and statistics of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3))


def test_a_training_that_continues_is_an_undisturbed_one(rows: pd.DataFrame, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.touch()
    ranks: dict[str, Any] = {"model": Noisy, "on": "driver", "ranks": 2, "batch_size": 10, "retries": 1}
    ranks["shuffle"] = "full"
    one, other = (fitted(rows, callbacks=[Dies(str(mark))], **ranks) for mark in (whole, broken))
    assert broken.exists()
    assert_same(one, other, rows, logged=0.3)


class Stops(lightning.Callback):
    """A callback that raises in the middle of the second epoch, once."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3) and not os.path.exists(self.mark):
            tr.world().checkpoint.wait()
            tr.world().barrier()
            if tr.world().rank == 0:
                Path(self.mark).touch()
            raise RuntimeError("out of luck")


def test_other_ranks_continue_with_the_epoch_from_its_first_row(rows: pd.DataFrame, tmp_path: Path) -> None:
    place: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "callbacks": [Stops(str(tmp_path / "mark"))]}
    with pytest.raises(tr.errors.RankFailed, match="out of luck"):
        fitted(rows, on="driver", ranks=2, global_batch_size=16, **place)
    model = fitted(rows, on="driver", ranks=1, global_batch_size=16, **place)
    assert [entry["epoch"] for entry in model.history] == [1, 2, 3]
    assert [entry["rows"] for entry in model.history] == [99, 99, 99]
    assert [entry["loss"] for entry in model.history] == sorted((e["loss"] for e in model.history), reverse=True)


def test_a_later_fit_continues_and_another_training_is_refused(rows: pd.DataFrame, tmp_path: Path) -> None:
    place: dict[str, Any] = {"run_dir": str(tmp_path / "run")}
    fitted(rows, epochs=2, **place)
    again = fitted(rows, epochs=2, **place)
    assert len(again.history) == 2
    assert_same(fitted(rows, epochs=4), fitted(rows, epochs=4, **place), rows, logged=1e-4)
    with pytest.raises(BadSetting, match=r"another training: .*trainer_args"):
        fitted(rows, epochs=4, trainer_args={"gradient_clip_val": 1.0}, **place)
    with pytest.raises(BadSetting, match=r"another training: .*batch_size: 16, was None"):
        fitted(rows, epochs=4, batch_size=16, **place)


class Manual(lightning.LightningModule):
    """Its own optimizers, and batches as a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, features: Any) -> Any:
        return self.second(torch.relu(self.first(features)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = torch.nn.functional.cross_entropy(self(batch["features"]), batch["label"])
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("own", loss, on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        right = (self(batch["features"]).argmax(1) == batch["label"]).float().mean()
        self.log("accuracy", right)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 0.05) for part in (self.first, self.second)]


def test_manual_optimization_of_two_optimizers(rows: pd.DataFrame) -> None:
    own: dict[str, Any] = {
        "model": Manual,
        "feature_cols": ["x0", "x1", "x2", "x3"],
        "label_cols": "c",
        "task": "classification",
        "weight_col": None,
        "batch_form": "dict",
        "epochs": 8,
        "global_batch_size": 16,
        "early_stopping": EarlyStopping(monitor="accuracy", mode="max", patience=7),
    }
    one, two = fitted(rows, **own), fitted(rows, on="driver", ranks=2, **own)
    np.testing.assert_allclose(one.predict(rows)["probability"], two.predict(rows)["probability"], atol=1e-5)
    assert "loss" not in one.history[-1]
    assert one.history[-1]["own"] < one.history[0]["own"]
    assert (one.predict(rows)["prediction"] == rows.c).mean() > 0.8


def test_accumulated_gradients_and_a_checkpoint_of_the_users(rows: pd.DataFrame, tmp_path: Path) -> None:
    saver = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path / "own", monitor="validation_error")
    halves: dict[str, Any] = {"trainer_args": {"accumulate_grad_batches": 2}, "callbacks": [saver]}
    rows = rows[:96].assign(held=np.arange(96) % 3 == 0)  # 64 to train on: all batches are full
    one, two = fitted(rows, batch_size=16), fitted(rows, global_batch_size=16, **halves)
    assert_same(one, two, rows, logged=0.2)
    assert len(list((tmp_path / "own").glob("*.ckpt"))) == 1


def test_a_fit_beside_another_has_its_own_file_of_lightnings(rows: pd.DataFrame, tmp_path: Path) -> None:
    """As the fits of a CrossValidator with parallelism=2 and on="here": one ends while the other is being resumed."""
    fitted(rows, epochs=2, run_dir=str(tmp_path / "one"))
    beside = []

    class FitsAnother(lightning.Callback):
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            beside.append(fitted(rows, epochs=2, run_dir=str(tmp_path / "two")))

    model = fitted(rows, callbacks=[FitsAnother()], run_dir=str(tmp_path / "one"))
    assert len(beside) == 1
    assert [len(one.history) for one in (model, beside[0])] == [3, 2]


class HoldsFilesBack(lightning.Callback):
    """A transaction of the file system from the first step to the last, as each save of ModelCheckpoint makes one."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        fsspec.filesystem("file").start_transaction()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        fsspec.filesystem("file").end_transaction()


def test_checkpoints_are_saved_while_lightning_saves_its_own(rows: pd.DataFrame, tmp_path: Path) -> None:
    fitted(rows, callbacks=[HoldsFilesBack()], run_dir=str(tmp_path))
    loaded, reasons = Store(str(tmp_path)).newest()
    assert loaded is not None
    assert (loaded["finished"], reasons) == (True, [])


class AveragesInMemory(lightning.Callback):
    """A callback that raises, unless the gradients of the rank's first step went through memory."""

    def __init__(self) -> None:
        self.averaged = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        mean = HostMemory.mean

        def count(memory: HostMemory, arrays: Any) -> None:
            self.averaged += 1
            mean(memory, arrays)

        HostMemory.mean = count  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.averaged == batch_idx + 1


def test_gradients_of_one_host_go_through_its_memory(rows: pd.DataFrame) -> None:
    fitted(rows, on="driver", ranks=2, epochs=1, callbacks=[AveragesInMemory()])


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
def test_a_module_that_was_given_is_not_changed_and_can_be_trained_before(rows: pd.DataFrame, tmp_path: Path) -> None:
    module = TwoInputs()
    loader = torch.utils.data.DataLoader([({"a": torch.ones(2), "b": torch.ones(2)}, torch.ones(1), torch.ones(()))])
    trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(module, loader, loader)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = fitted(rows, model=module, on="driver", ranks=2)
    assert module.trainer is trainer
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert isinstance(model.module(), TwoInputs)
    model.model.save(str(tmp_path / "model"))
    again = tr.load(str(tmp_path / "model"), trusted=True)
    np.testing.assert_allclose(again.predict(rows), model.predict(rows), rtol=1e-6)


def test_a_loss_that_is_no_number(rows: pd.DataFrame) -> None:
    class Breaks(TwoInputs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (float("nan") if self.global_step == 9 else 1.0)

    with pytest.raises(TrainingDiverged, match=r"loss of rank 0 is NaN or infinite: epoch 3, step 2"):
        fitted(rows, model=Breaks, on="driver", check="off")


def test_a_monitor_that_nobody_logs(rows: pd.DataFrame) -> None:
    rule = EarlyStopping(monitor="val_loss")
    with pytest.raises(BadSetting, match=r"monitors 'val_loss', and the history of epoch 1 has .*validation_loss"):
        fitted(rows, early_stopping=rule)


class NoStep(lightning.LightningModule):
    def forward(self, features: Any) -> Any:
        return features

    def configure_optimizers(self) -> Any:
        return None


class NoForward(lightning.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum()

    def configure_optimizers(self) -> Any:
        return None


class Unpacks(TwoInputs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, label = batch
        return label.mean()


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": NoStep()}, BadSetting, r"NoStep has no training_step\(self, batch, batch_idx\)"),
    ({"model": NoStep}, BadSetting, r"NoStep has no training_step\(self, batch, batch_idx\)"),
    ({"model": NoForward()}, BadSetting, "NoForward has no forward, which predicts"),
    ({"model": NoForward(), "validation": "held"}, BadSetting, "validation= is given, and model=NoForward has no"),
    ({"model": torch.nn.Linear(2, 1)}, BadSetting, "no LightningModule. TorchEstimator trains a torch.nn.Module"),
    ({"model": lambda: 3}, BadSetting, "returned a int, no LightningModule"),
    (
        {"model": Unpacks},
        BadData,
        r"(?s)step of Unpacks fails: ValueError: too many values.*label \[batch, 1\]",
    ),
    ({"feature_cols": {"a": ["x0"], "b": ["x1"]}}, BadData, "forward can't take these features"),
    ({"trainer_args": {"max_epochs": 3}}, BadSetting, "'max_epochs', which the estimator sets: give epochs="),
    ({"trainer_args": {"strategy": "fsdp"}}, BadSetting, "strategy='fsdp' is none with which every rank has"),
    ({"trainer_args": {"precison": "16"}}, BadSetting, "has no such argument. Did you mean 'precision'?"),
    ({"trainer_args": 3}, BadSetting, "trainer_args=3 must be a mapping"),
    ({"callbacks": [Dies]}, BadSetting, "the callback Dies is a class; give an instance"),
    ({"callbacks": ["early"]}, BadSetting, "the callback 'early' is none of Lightning's"),
    ({"optimizer": "adam"}, BadSetting, "It is the module's"),
    ({"precision": "16"}, BadSetting, "It is the Trainer's: trainer_args={'precision': …}"),
    ({"shuffle": "stream"}, BadSetting, "shuffle='stream' is unknown"),
    ({"if_data_changed": "restart"}, BadSetting, "restarts an epoch"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), REFUSED, ids=[text[:40] for *_, text in REFUSED])
def test_what_does_not_fit_is_refused_before_anything_starts(
    rows: pd.DataFrame, changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        fitted(rows, **{"validation": None, "on": "driver"} | changes)
