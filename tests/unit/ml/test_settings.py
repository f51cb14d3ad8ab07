"""Wrong settings, columns or models are refused before anything starts; Params derive from dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.checkpoint.store import Store
from tritium.data.tables import Tables
from tritium.errors import BadData, BadRow, BadSetting, TrainingDiverged
from tritium.ml import Callback, EarlyStopping, TorchEstimator, TorchModel, TorchSettings, fit
from tritium.ml.fitting import prepare, run
from tritium.ml.torch.backend import TorchBackend
from tritium.ml.torch.schedule import is_per_step

X = ["a", "b", "c"]


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, 0.05)


def linear() -> nn.Module:
    return nn.Linear(3, 1)


GOOD: dict[str, Any] = {
    "model": linear,
    "loss": nn.MSELoss(),
    "optimizer": sgd,
    "feature_cols": X,
    "label_cols": ["y"],
    "verbose": False,
}
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none"}


def table(rows: int = 20) -> pa.Table:
    random = np.random.default_rng(1)
    columns: dict[str, Any] = {name: random.normal(size=rows) for name in X}
    columns["y"] = columns["a"] + 2 * columns["b"]
    columns["count"] = np.arange(rows)
    columns["cls"] = np.arange(rows) % 3
    columns["index"] = (np.arange(rows) % 3).astype(float)
    columns["city"] = ["x"] * rows
    columns["when"] = pa.array([pd.Timestamp("2026-01-01")] * rows)
    columns["held"] = np.arange(rows) % 4 == 0
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(random.normal(size=rows * 4)), 4)
    columns["ragged"] = pa.array([[1.0] * (1 + i % 2) for i in range(rows)])
    return pa.table(columns)


class KerasLike(Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:  # type: ignore[override]
        pass

    def __repr__(self) -> str:
        return "KerasLike"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"batch_size": True}, "batch_size=True"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"gradient_accumulation": 0}, "gradient_accumulation=0"),
        ({"batch_size": 8, "global_batch_size": 16}, "contradict each other"),
        ({"seed": -1}, "seed=-1"),
        ({"clip_grad_norm": 0}, "clip_grad_norm=0"),
        ({"early_stopping": 0}, "early_stopping=0"),
        ({"validation": 1.5}, "validation=1.5 must be a fraction between 0 and 1"),
        ({"task": "regresion"}, "Did you mean 'regression'?"),
        ({"remainder": "keep"}, "remainder='keep' is unknown; choose one of 'pad', 'drop', 'repeat'"),
        ({"shuffle": "ful"}, "Did you mean 'full'?"),
        ({"precision": "fp64"}, "precision='fp64' is unknown"),
        ({"optimizer": "adam"}, "optimizer='adam' is not a function. Give a function of the parameters"),
        ({"optimizer": sgd(nn.Linear(1, 1).parameters())}, "optimizer=SGD(…) is not a function. Give a function of"),
        ({"optimizer": lambda: None}, "takes nothing; it is called with the parameters"),
        ({"optimizer": lambda p, lr: None}, "needs p, lr; it is called with the module's parameters alone"),
        ({"loss": "mse"}, "loss='mse' is not a function. Give an instance or a function: torch.nn.MSELoss()"),
        ({"model": 3}, "model=3 is not a function"),
        ({"model": nn.Linear}, "model=Linear is a class that needs in_features, out_features"),
        ({"loss": None}, "there is no loss"),
        ({"loss": nn.MSELoss}, "loss=MSELoss is a class; give an instance, MSELoss()"),
        ({"loss": nn.MSELoss(reduction="sum")}, 'reduction="sum"'),
        ({"feature_cols": []}, "feature_cols=[] must be a column, or a list of columns"),
        ({"feature_cols": {"label": ["a"]}}, "feature_cols names an input 'label'"),
        ({"label_cols": 3}, "label_cols=3"),
        ({"weight_col": ["a"]}, "weight_col=['a'] must be the name of one column"),
        ({"weight_col": "a", "train_step": min}, "can't weight the loss of a train_step"),
        ({"metrics": "mae"}, "metrics='mae' must be a mapping"),
        ({"metrics": {"loss": max}}, "a metric is called 'loss'"),
        ({"metrics": [max, max]}, "two metrics are called 'max'"),
        ({"metrics": {"m": 3}}, "the metric 'm' is 3"),
        ({"callbacks": [object()]}, "has no on_train_start, on_epoch_end, on_train_end"),
        ({"lr_scheduler": torch.optim.lr_scheduler.StepLR}, "StepLR needs optimizer, step_size"),
        ({"lr_scheduler": lambda o, a, b: None}, "needs o, a, b"),
        ({"lr_scheduler": lambda: None}, "takes nothing"),
        ({"lr_scheduler": lambda o, *, steps: None}, "needs o, steps"),
        ({"if_data_changed": "continue"}, "if_data_changed='continue' is unknown; choose one of 'refuse', 'restart'"),
        ({"checkpoint_every": "1 minute"}, 'checkpoint_every=\'1 minute\' must be a time ("30s", "5min", "2h")'),
        ({"checkpoint_every": object}, "checkpoint_every=<class 'object'> must be a time"),
        ({"checkpoint_every": 0}, "checkpoint_every=0 must be"),
        ({"checkpoint_every": True}, "checkpoint_every=True must be"),
        ({"checkpoint_keep": "x"}, "checkpoint_keep='x' must be a whole number of at least 1"),
        ({"callbacks": Callback()}, "callbacks=Callback(…) must be a list: callbacks=[…]"),
        ({"callbacks": [Callback]}, "the callback Callback is a class; give an instance, Callback()"),
        (
            {"callbacks": [KerasLike()]},
            "on_epoch_end of the callback KerasLike takes epoch, logs; it is called with (s",
        ),
        ({"train_step": lambda module: 0}, "takes module; it is called with (module, batch)"),
        ({"train_step": lambda module, batch, more: 0}, "takes module, batch, more; it is called with (module, batch)"),
        ({"early_stopping": EarlyStopping(monitor="acc")}, "monitors 'acc'; the history will have loss"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        TorchSettings(**(GOOD | wrong))
    assert says in str(caught.value)


def test_a_whole_number_may_be_numpys() -> None:
    names = ("batch_size", "epochs", "gradient_accumulation", "seed", "checkpoint_keep", "early_stopping")
    settings = TorchSettings(**GOOD, **dict.fromkeys(names, np.int64(3)))
    gang = tr.Gang(ranks=np.int64(2), cpus=np.int32(1))  # type: ignore[arg-type]
    kept = [getattr(settings, name) for name in names] + [gang.ranks, gang.cpus]
    assert kept == [3] * len(names) + [2, 1]
    assert {type(value) for value in kept} == {int}
    assert EarlyStopping(patience=np.int64(3)) == EarlyStopping(patience=3)  # type: ignore[arg-type]
    assert tr.Gang(ranks=(np.int64(1), np.int64(2))).ranks == (1, 2)  # type: ignore[arg-type]
    for wrong in (np.float64(8), np.True_, np.array([8])):
        with pytest.raises(BadSetting, match=r"batch_size=.* must be a whole number"):
            TorchSettings(**GOOD, batch_size=wrong)


def test_every_wrong_setting_is_listed_at_once() -> None:
    with pytest.raises(BadSetting) as caught:
        TorchSettings(**(GOOD | {"batch_size": 0, "task": "x", "epochs": -1}))
    assert len(caught.value.settings) == 3


def test_the_global_batch_is_shared_out_evenly() -> None:
    settings = TorchSettings(**GOOD, global_batch_size=24, gradient_accumulation=2)
    assert settings.rows_per_rank(3) == 4
    with pytest.raises(BadSetting, match=r"24 is not a multiple of .* 5 x 2 = 10. Use 20 or 30"):
        settings.rows_per_rank(5)
    assert TorchSettings(**GOOD).rows_per_rank(5) == 32


def refused(frame: Any = None, **changes: Any) -> str:
    """Return the error of these settings, raised before anything starts."""
    with pytest.raises((BadData, BadSetting)) as caught:
        prepare(
            TorchBackend(), table() if frame is None else frame, TorchSettings(**(GOOD | changes)), tr.Gang(on="here")
        )
    return str(caught.value)


def test_every_column_that_can_not_be_read_is_listed_at_once() -> None:
    said = refused(feature_cols=["a", "B", "city", "when"], label_cols=["z"], weight_col="w")
    assert "feature column 'B' is missing. Did you mean 'b'?" in said
    assert (
        "feature column 'city' is a string. The model gets the index of a word: learn the words, vocabulary=['city']"
        in said
    )
    assert "feature column 'when' is a timestamp" in said
    assert "label column 'z' is missing" in said
    assert "weight column 'w' is missing" in said


def test_a_forward_that_does_not_fit_is_shown_with_shapes() -> None:
    said = refused(feature_cols=["a", "b"])
    assert "forward can't take these features: RuntimeError" in said
    assert "features [batch, 2] float32 of columns 'a', 'b'" in said
    assert "features [batch, 4] float32 of column 'vector'" in refused(feature_cols="vector")
    one = {"model": lambda: nn.Linear(1, 1)}
    assert "For [batch, 1] give a list: feature_cols=['a']" in refused(feature_cols="a", **one)
    prepare(TorchBackend(), table(), TorchSettings(**GOOD | one | {"feature_cols": ["a"]}), tr.Gang(on="here"))


class Squeezed(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.last = nn.Linear(3, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x).squeeze(-1)


def test_a_label_that_would_be_broadcast_is_refused_with_the_fix() -> None:
    said = refused(model=Squeezed)
    assert "output has shape [batch] and the label [batch, 1]" in said
    assert "unsqueeze(-1)" in said
    said = refused(label_cols=["count"])
    assert "output has shape [batch, 1] and the label [batch]" in said
    assert "cast it to double" in said
    said = refused(model=lambda: nn.Linear(3, 4))
    assert "output has shape [batch, 4] and the label [batch, 1]" in said
    own = refused(model=Squeezed, loss=lambda output, label: (output - label).square().mean())
    assert "broadcast" in own


def test_a_loss_that_does_not_fit_is_shown_with_shapes() -> None:
    said = refused(model=lambda: nn.Linear(3, 3), loss=nn.CrossEntropyLoss(), task="regression")
    assert "loss=CrossEntropyLoss can't take what there is" in said
    assert "the module's output [batch, 3] float32" in said
    assert "label [batch, 1] float32 of column 'y'" in said
    assert "integer label column" in said


class TwoHeads(nn.Module):
    def __init__(self, named: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.named = nn.Linear(3, 1), nn.Linear(3, 2), named

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.one(x), "z": self.two(x)} if self.named else (self.one(x), self.two(x))


def test_a_module_that_returns_several_tensors_is_told_what_its_loss_can_not_take() -> None:
    said = refused(model=TwoHeads)
    assert "returns a tuple of 2, and loss=MSELoss can't take it" in said
    assert "output_0 [batch, 1] float32" in said
    assert "output_1 [batch, 2] float32" in said
    assert "your_loss(output[0], label)" in said
    assert "your_loss(output['y'], label)" in refused(model=lambda: TwoHeads(named=True))
    picked = GOOD | {"model": TwoHeads, "loss": lambda output, label: nn.functional.mse_loss(output[0], label)}
    assert len(fit(table(), **picked, **HERE).signature.outputs) == 2, "what is advised works"


def task_of(**changes: Any) -> tuple[str | None, tuple[str, ...]]:
    plan = prepare(TorchBackend(), table(), TorchSettings(**(GOOD | changes)), tr.Gang(on="here"))
    return plan.settings.task, plan.notes


def test_a_loss_of_classes_makes_a_classification() -> None:
    scores: dict[str, Any] = {"model": lambda: nn.Linear(3, 3), "label_cols": "cls"}
    smooth = functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)
    for loss in (nn.CrossEntropyLoss(), nn.NLLLoss(), nn.functional.cross_entropy, smooth):
        assert task_of(**scores, loss=loss) == ("classification", ())
        assert task_of(**scores | {"label_cols": ["index"]}, loss=loss) == ("classification", ())
    assert task_of() == ("regression", ())
    assert task_of(**scores, loss=nn.CrossEntropyLoss(), task=None) == (None, ())
    assert task_of(**scores, loss=nn.CrossEntropyLoss(), task="regression") == ("regression", ())
    weighted = functools.partial(nn.functional.binary_cross_entropy_with_logits, pos_weight=torch.tensor(3.0))
    for label in ("held", "count"):
        for loss in (nn.BCEWithLogitsLoss(), weighted):
            assert task_of(loss=loss, label_cols=label) == ("classification", ())
    for label in (["index"], "y"):  # floating labels, as StringIndexer makes them, are classes, too
        assert task_of(loss=nn.BCEWithLogitsLoss(), label_cols=label) == ("classification", ())
    pairs: dict[str, Any] = {"model": lambda: nn.Linear(3, 2), "label_cols": ["y", "index"]}
    assert task_of(**pairs, loss=nn.BCEWithLogitsLoss()) == ("regression", ())
    task, notes = task_of(**scores, loss=lambda output, label: nn.functional.cross_entropy(output, label))
    assert task == "regression"
    assert "label column 'cls' suggest, say task=\"classification\"" in notes[0]
    model = fit(table(), **GOOD | scores | {"loss": nn.CrossEntropyLoss()}, **HERE)
    assert sorted(model.predict(table())) == ["prediction", "probability"]


def test_a_loss_of_the_users_is_not_torchs_by_its_name() -> None:
    def binary_cross_entropy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(output, label.float())

    torchs, own = (TorchSettings(**GOOD | {"loss": loss}) for loss in (nn.BCELoss(), binary_cross_entropy))
    assert (torchs.is_of_one_score(), torchs.gives_probabilities()) == (True, True)
    assert (own.is_of_one_score(), own.gives_probabilities()) == (False, False)


def test_a_class_that_the_module_gives_no_score_for_is_named() -> None:
    scores: dict[str, Any] = GOOD | {
        "model": lambda: nn.Linear(3, 2),
        "label_cols": "cls",
        "loss": nn.CrossEntropyLoss(),
    }
    with pytest.raises(
        BadRow, match=r"label column 'cls' holds the class 2, .* gives 2 scores a row, .* 0 to 1"
    ) as caught:
        fit(table(), **scores, **HERE)
    assert (caught.value.column, caught.value.value) == ("cls", 2)
    with pytest.raises(BadRow, match="holds the class 2"):
        fit(table(), **scores, weight_col="index", **HERE)


@pytest.mark.parametrize(("value", "shown"), [(40.25, "40.25"), (float("nan"), "nan"), (float("inf"), "inf")])
def test_a_label_that_is_no_class_index_is_named(value: float, shown: str) -> None:
    scores: dict[str, Any] = {"model": lambda: nn.Linear(3, 3), "label_cols": "index", "loss": nn.CrossEntropyLoss()}
    rows = table().to_pandas()
    rows.loc[[3, 5], "index"] = value
    said = refused(rows, **scores)
    assert f"label column 'index' must hold class indices, and holds {shown}" in said
    assert "torch.nn.MSELoss()" in said
    (code,) = re.findall(r"df\.dropna\(subset=\['index'\]\)", said)
    if shown == "nan":
        prepare(TorchBackend(), eval(code, {"df": rows}), TorchSettings(**GOOD | scores), tr.Gang(on="here"))


@pytest.mark.parametrize(
    "loss",
    [
        nn.BCEWithLogitsLoss(),
        nn.BCELoss(),
        nn.functional.binary_cross_entropy_with_logits,
        functools.partial(nn.functional.binary_cross_entropy_with_logits, reduction="mean"),
    ],
)
def test_a_label_beside_zero_and_one_is_refused_where_one_score_is_compared(loss: Any) -> None:
    """For whole numbers it was trained on unsaid."""

    def score() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())

    rows = table().to_pandas()
    given = GOOD | {"model": score, "loss": loss, "label_cols": "c", "task": "classification"}
    for labels, wrong in (([0, 1, 2, 1], 2), ([-1, 1, 1, -1], -1), ([0.0, 1.0, 1.5, 0.0], 1.5)):
        with pytest.raises(
            BadRow, match=rf"label column 'c' holds {wrong}, .* with 0 or 1.*CrossEntropyLoss"
        ) as caught:
            fit(rows.assign(c=labels * 5), **given, **HERE)
        assert (caught.value.column, caught.value.value) == ("c", wrong)
    for labels in ([0, 1, 1, 0], [True, False] * 2, [0.0, 0.5, 1.0, 0.9]):
        assert len(fit(rows.assign(c=labels * 5), **given, **HERE).history) == 1
    with pytest.raises(BadRow, match="label column 'c' holds 2"):  # as integers alone make a classification of it
        fit(rows.assign(c=[0, 1, 2, 1] * 5), **given | {"task": "auto"}, **HERE)


def test_a_batch_larger_than_what_there_is_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    shown = HERE | {"progress": True}
    fit(table(), **GOOD | {"verbose": True}, batch_size=1_000_000, epochs=2, **shown)
    out = capsys.readouterr().out
    assert out.count("an epoch is one step: batch_size=1,000,000 is more than the 20 rows of a rank") == 1
    fit(table(), **GOOD | {"verbose": True}, batch_size=20, **shown)
    assert "one step" not in capsys.readouterr().out


def test_the_last_line_counts_as_the_history_does(capsys: pytest.CaptureFixture[str]) -> None:
    model = fit(table(), **GOOD | {"verbose": True}, batch_size=4, epochs=3, **HERE | {"progress": True})
    assert [entry["epoch"] for entry in model.history] == [1, 2, 3]
    lines = [line for line in capsys.readouterr().out.splitlines() if "epoch" in line]
    assert lines[-1].startswith("tritium: epoch 3/3, step 5/5")


@pytest.mark.processes
@pytest.mark.parametrize(("library", "extra"), [("torch", "torch"), ("pyspark", "spark")])
def test_a_library_that_is_missing_is_named_with_its_extra(library: str, extra: str) -> None:
    program = f"import sys; sys.modules[{library!r}] = None\nfrom tritium.ml import fit, TorchEstimator\n"
    if library == "torch":
        program += "TorchEstimator(model=min, loss=min, optimizer=min, feature_cols=['a'], label_cols='b').fit(None)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert f"needs {library}, which {sys.executable} does not have" in run.stderr
    assert f"pip install 'tritium[{extra}]'" in run.stderr


def test_a_weighted_loss_must_give_a_loss_per_row() -> None:
    said = refused(weight_col="c", loss=lambda output, label: (output - label).abs().mean())
    assert "weight_col needs a loss per row" in said


def test_other_models_that_can_not_be_trained() -> None:
    assert "returned a int, not a torch.nn.Module" in refused(model=lambda: 3)
    assert "could not be made: ZeroDivisionError" in refused(model=lambda: 1 / 0)
    assert "lazy layers" in refused(model=lambda: nn.LazyLinear(1))
    assert "validation column 'nope' is missing" in refused(validation="nope")
    assert "it must be boolean" in refused(validation="a")
    assert "global_batch_size=7 is not a multiple" in refused(global_batch_size=7, gradient_accumulation=2)


def test_tables_need_no_cluster() -> None:
    with pytest.raises(BadSetting, match=r'on="driver"'):
        prepare(TorchBackend(), table(), TorchSettings(**GOOD), tr.Gang())
    with pytest.raises(BadData, match="a pandas DataFrame or a pyarrow Table"):
        prepare(TorchBackend(), [1, 2], TorchSettings(**GOOD), tr.Gang(on="here"))
    with pytest.raises(BadSetting, match=r"takes the DataFrame itself, and no tr\.Data.* nulls=, nan= and pad="):
        prepare(TorchBackend(), tr.Data(table(), nan="keep"), TorchSettings(**GOOD), tr.Gang(on="here"))
    with pytest.raises(BadSetting, match=r"validation is a tr\.Data"):
        prepare(TorchBackend(), table(), TorchSettings(**GOOD, validation=tr.Data(table())), tr.Gang(on="here"))


def test_labels_become_what_the_model_gives() -> None:
    """Floating columns `[batch, n]`; one integer column, or whole numbers with a score per class, `[batch]`."""

    def label(**changes: Any) -> tuple[str, tuple[int, ...]]:
        field = prepare(TorchBackend(), table(), TorchSettings(**(GOOD | changes)), tr.Gang(on="here")).fields["label"]
        return field.dtype, field.shape

    scores: Callable[[], nn.Module] = lambda: nn.Linear(3, 3)  # noqa: E731
    classes: dict[str, Any] = {"model": scores, "loss": nn.CrossEntropyLoss(), "task": "classification"}
    assert label() == ("float32", (1,))
    assert label(label_cols=["y", "a"], model=lambda: nn.Linear(3, 2)) == ("float32", (2,))
    assert label(label_cols="cls", **classes) == ("int64", ())
    assert label(label_cols="index", **classes) == ("int64", ())
    one = {"loss": nn.BCEWithLogitsLoss(), "task": "classification", "label_cols": "index"}
    assert label(**one) == ("float32", (1,))
    assert "must hold class indices" in refused(label_cols="a", **classes)


def test_an_optimizer_that_is_none_is_refused_before_anything_starts() -> None:
    said = refused(optimizer=lambda parameters: (torch.optim.SGD(parameters, 0.1), None))
    assert "returned a tuple, and must return one torch.optim.Optimizer" in said
    assert "returned a NoneType" in refused(optimizer=lambda parameters: None)


def test_what_no_step_can_be_taken_with_is_refused_before_anything_starts() -> None:
    plateau, step_lr = torch.optim.lr_scheduler.ReduceLROnPlateau, torch.optim.lr_scheduler.StepLR
    said = refused(lr_scheduler=lambda optimizer, steps: plateau(optimizer))
    assert "its step needs metrics" in said
    assert "lambda optimizer: ReduceLROnPlateau(optimizer)" in said
    assert "returned a list, and must return one scheduler" in refused(lr_scheduler=lambda o: [step_lr(o, 1)])
    assert "returned a NoneType" in refused(lr_scheduler=lambda o, steps: None)
    assert "its step needs closure" in refused(optimizer=torch.optim.LBFGS)
    assert "no weights to train" in refused(model=lambda: linear().requires_grad_(False))
    assert "no weights to train" in refused(model=nn.Flatten)

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(20, 1, sparse=True)

        def forward(self, x: Any) -> Any:
            return self.rows(x)

    said = refused(model=Sparse, feature_cols="count", clip_grad_norm=1.0)
    assert "'rows.weight' has sparse gradients, of which clip_grad_norm can't take the norm" in said


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=steps),
        lambda o, steps: torch.optim.lr_scheduler.LinearLR(o, total_iters=3 // (steps - 100)),  # not of 100 steps
    ],
)
def test_a_scheduler_that_works_or_can_not_be_tried_is_left_to_the_ranks(scheduler: Any) -> None:
    prepare(TorchBackend(), table(), TorchSettings(**GOOD | {"lr_scheduler": scheduler}), tr.Gang(on="here"))


def test_the_metrics_of_a_collection_have_its_names() -> None:
    import torchmetrics

    def names(metrics: Any) -> list[str]:
        return list(TorchSettings(**GOOD | {"metrics": metrics}).named_metrics())

    mae, r2 = torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()
    assert names(torchmetrics.MetricCollection({"mae": mae, "r2": r2}, prefix="my_")) == ["my_mae", "my_r2"]
    assert names([torchmetrics.MetricCollection([mae, r2]), mae]) == [
        "MeanAbsoluteError",
        "R2Score",
        "mean_absolute_error",
    ]
    assert "two metrics are called 'mae'" in refused(
        metrics={"mae": mae, "x": torchmetrics.MetricCollection({"mae": mae})}
    )


def test_parameters_without_a_gradient_are_known_before() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    assert prepare(
        TorchBackend(), table(), TorchSettings(**(GOOD | {"model": Unused})), tr.Gang(on="here")
    ).facts.find_unused_parameters
    assert not prepare(TorchBackend(), table(), TorchSettings(**GOOD), tr.Gang(on="here")).facts.find_unused_parameters


def test_a_step_of_the_users_is_tried_where_that_is_possible() -> None:
    """Whatever its first step uses, the next one may leave out parameters."""
    steps: list[Any] = [
        lambda module, batch: nn.functional.mse_loss(module(batch["features"]), batch["label"]),
        lambda module, batch: module(batch["features"]).mean() * (batch.epoch + batch.step + batch.rows),
        lambda module, batch: module.weight.square().sum(),
        lambda module, batch: torch.distributed.get_rank() + module.weight.sum(),
    ]
    for step in steps:
        settings = TorchSettings(**GOOD | {"loss": None, "train_step": step})
        assert prepare(TorchBackend(), table(), settings, tr.Gang(on="here")).facts.find_unused_parameters
    said = refused(train_step=lambda module, batch: module(batch["x"]).sum(), loss=None)
    assert "train_step asks for batch['x'], and a batch has 'features', 'label'" in said


def test_fit_gives_a_model_without_spark(tmp_path: Any) -> None:
    given = nn.Linear(3, 1)
    before = given.weight.detach().clone()
    frame = table(200).to_pandas()[[*X, "y", "held"]]
    model = fit(frame, **(GOOD | {"model": given, "epochs": 30, "validation": "held"}), **HERE, run_dir=str(tmp_path))
    assert torch.equal(given.weight, before), "the user's module stays as it was"
    assert model.history[-1]["validation_loss"] < 0.05
    assert model.signature.inputs[0].columns == ("a", "b", "c")
    assert model.signature.inputs[0].shape == (3,)
    assert np.abs(model.predict(frame) - frame["y"]).max() < 1
    assert len(model.history) == 30


def test_the_validation_fraction_is_the_same_for_the_same_seed() -> None:
    def rows(seed: int) -> int:
        settings = TorchSettings(**GOOD, validation=0.25, seed=seed)
        data = prepare(TorchBackend(), table(200), settings, tr.Gang(on="here")).data["validation"]
        return sum(batch.num_rows for batch in Tables({"validation": data}, 1).batches(0)) - 1  # the anchor

    assert rows(0) == rows(0)
    assert 25 < rows(0) < 75
    assert len({rows(seed) for seed in range(5)}) > 1


def test_validation_on_another_frame() -> None:
    model = fit(table(50), **GOOD, validation=table(10), **HERE)
    assert "validation_loss" in model.history[0]
    assert model.history[0]["rows"] == 50


def test_rows_that_can_not_be_trained_on() -> None:
    holes = table(20).set_column(0, "a", pa.array([None if i == 3 else 1.0 for i in range(20)]))
    with pytest.raises(BadRow) as caught:
        fit(holes, **GOOD, **HERE)
    assert (caught.value.column, caught.value.row_id) == ("a", 3)
    with pytest.raises(BadRow, match="ragged"):
        fit(table(20), **(GOOD | {"feature_cols": "ragged", "model": lambda: nn.Linear(1, 1)}), **HERE)


@pytest.mark.parametrize("accumulated", [1, 8])
def test_one_batch_at_a_time_is_in_memory_however_many_make_a_step(accumulated: int) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most: list[int] = []

    def step(module: nn.Module, batch: Any) -> torch.Tensor:
        alive.add(batch["features"])
        most.append(len(alive))
        return nn.functional.mse_loss(module(batch["features"]), batch["label"])

    many = GOOD | {"loss": None, "train_step": step, "batch_size": 2, "gradient_accumulation": accumulated, "epochs": 2}
    fit(table(40), **many, **HERE)
    assert len(most) >= 40
    assert max(most) == 1


def test_a_scheduler_is_judged_by_how_many_arguments_it_takes() -> None:
    """Their names are the user's."""
    scheduler = torch.optim.lr_scheduler.LinearLR
    for per_step in (lambda o, n: scheduler(o, 1.0, 0.1, n), lambda o, steps: scheduler(o, 1.0, 0.1, steps)):
        assert is_per_step(TorchSettings(**GOOD, lr_scheduler=per_step))
    for per_epoch in (lambda opt: scheduler(opt), scheduler, functools.partial(scheduler, total_iters=3)):
        assert not is_per_step(TorchSettings(**GOOD, lr_scheduler=per_epoch))
    rates = [
        e["learning_rate"]
        for e in fit(table(), **GOOD, lr_scheduler=lambda o, n: scheduler(o, 1, 0.1, n), **HERE).history
    ]
    assert rates == pytest.approx([0.005])


class HoldsNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(x), None


def test_an_output_that_no_prediction_can_be_made_of_is_found_before_the_start() -> None:
    first: dict[str, Any] = {"loss": lambda output, label: nn.functional.mse_loss(output[0], label)}
    said = refused(model=HoldsNone, **first)
    assert "output_1 is None" in said
    own = {"train_step": lambda module, batch: first["loss"](module(batch["features"]), batch["label"]), "loss": None}
    assert "output_1 is None" in refused(model=HoldsNone, **own)

    class Dropped(HoldsNone):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) if not self.training else (self.last(x), self.last(x))

    assert "output_1 is None" in refused(model=Dropped, **first)

    class Summed(HoldsNone):
        def forward(self, x: torch.Tensor) -> Any:
            return self.last(x).sum()

    assert "no row" in refused(model=Summed, **own | {"train_step": lambda module, batch: module(batch["features"])})


def test_such_an_output_is_found_before_the_first_step_where_only_the_rows_show_their_length(tmp_path: Path) -> None:
    """An array column of a table without rows has no length that is known before."""
    rows = pa.table({"v": pa.array([[1.0, 2.0, 3.0]] * 8), "y": np.arange(8.0)})
    asked: list[int] = []

    def step(module: Any, batch: Any) -> Any:
        asked.append(1)
        return nn.functional.mse_loss(module(batch["features"])[0], batch["label"])

    settings = GOOD | {"feature_cols": "v", "loss": None, "train_step": step, "model": HoldsNone, "batch_size": 2}
    plan = prepare(TorchBackend(), rows.slice(0, 0), TorchSettings(**settings), tr.Gang(on="here"))
    assert not plan.facts.output_known
    plan = dataclasses.replace(
        plan, gang=tr.Gang(**HERE), data={"train": dataclasses.replace(plan.data["train"], frame=rows)}
    )
    with pytest.raises(BadData, match="output_1 is None"):
        run(plan)
    assert asked == []


def test_a_class_as_model_keeps_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("nets_of_a_user.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.last = torch.nn.Linear(3, 1)\n    def forward(self, x):\n        return self.last(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import nets_of_a_user

    try:
        model = fit(table(), **GOOD | {"model": nets_of_a_user.Net}, **HERE)
        assert model.origin == "nets_of_a_user:Net"
    finally:
        del sys.modules["nets_of_a_user"]


DRAWN = """
import numpy as np, random, torch
class Drawn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(8, 1)
        self.draw()
    def forward(self, x):
        return self.last(torch.cos(x @ self.drawn))
class Attribute(Drawn):
    def draw(self):
        self.drawn = torch.randn(3, 8)
class Buffer(Drawn):
    def draw(self):
        self.register_buffer("drawn", torch.randn(3, 8), persistent=False)
class Numpy(Drawn):
    def draw(self):
        self.drawn = torch.tensor(np.random.normal(size=(3, 8)) * random.random(), dtype=torch.float32)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("name", "where"), [("Attribute", "here"), ("Buffer", "here"), ("Numpy", "driver")])
def test_what_a_module_drew_outside_its_state_is_the_models_too(
    name: str, where: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random features: the trained layer means nothing behind other ones."""
    tmp_path.joinpath("drawing_nets.py").write_text(DRAWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import drawing_nets  # type: ignore[import-not-found]

    try:
        rows = table(60).to_pandas()[[*X, "y"]]
        chosen = {"model": getattr(drawing_nets, name), "validation": rows, "seed": 2**32 + 5}
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        model = fit(rows, **GOOD | chosen, **HERE | {"on": where, "ranks": 1 if where == "here" else 2})
        assert ((model.predict(rows) - rows["y"]) ** 2).mean() == pytest.approx(
            model.history[-1]["validation_loss"], rel=1e-4
        )
        model.save(str(tmp_path / "one"))
        loaded = tr.load(str(tmp_path / "one"), trusted="drawing_nets")
        assert (loaded.predict(rows) == model.predict(rows)).all()
        loaded.save(str(tmp_path / "two"))
        again = tr.load(str(tmp_path / "two"), trusted="drawing_nets")
        assert (again.predict(rows) == model.predict(rows)).all()
        assert torch.equal(torch.get_rng_state(), before[0]), "the user's generators are as they were"
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[union-attr]
    finally:
        del sys.modules["drawing_nets"]


def test_what_is_advised_for_a_null_a_nan_and_a_ragged_row_is_a_setting_here() -> None:
    """The same goes for prediction: the model keeps it."""
    rows = table(20).to_pandas()[[*X, "y"]].astype({"a": "object"})
    rows.loc[3, "a"] = None
    rows["a"] = rows["a"].astype("Float64")
    with pytest.raises(BadRow) as caught:
        fit(rows, **GOOD, **HERE)
    assert "nulls={'a': value}" in str(caught.value)
    model = fit(rows, **GOOD, **HERE, nulls={"a": 0.5})
    filled = rows.assign(a=rows["a"].fillna(0.5).astype(float))
    assert model.predict(rows) == pytest.approx(model.predict(filled))
    rows["a"] = [np.nan if i == 3 else 1.0 for i in range(20)]
    with pytest.raises(BadRow) as caught:
        fit(rows, **GOOD, **HERE)
    assert "nan='keep'" in str(caught.value)

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x.nan_to_num(0.25))

    model = fit(rows, **GOOD | {"model": Careful}, **HERE, nan="keep")
    assert model.predict(rows) == pytest.approx(model.predict(rows.fillna(0.25)))
    ragged: dict[str, Any] = GOOD | {"feature_cols": "ragged", "model": lambda: nn.Linear(2, 1)}
    with pytest.raises(BadRow) as caught:
        fit(table(20), **ragged | {"model": lambda: nn.Linear(1, 1)}, **HERE)
    assert "pad={'ragged': 2}" in str(caught.value)
    model = fit(table(20), **ragged, **HERE, pad={"ragged": 2})
    assert model.signature.inputs[0].shape == (2,)
    assert len(model.predict(table(20).select(["ragged"]))) == 20


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nulls": {"a": "mask"}}, "a mask needs tr.launch and tr.Data"),
        ({"nan": "drop"}, "nan='drop' is unknown"),
        ({"pad": 3}, "pad=3 must be a mapping"),
        ({"nulls": {"A": 0}}, "nulls names 'A', which is not read. Did you mean 'a'?"),
    ],
)
def test_what_becomes_of_nulls_is_checked_before_the_start(wrong: dict[str, Any], says: str) -> None:
    assert says in refused(**wrong)


@pytest.mark.processes
@pytest.mark.parametrize("where", ["here", "driver"])
def test_the_estimator_fits_a_pandas_frame(where: Any) -> None:
    rows = table(40).to_pandas()[[*X, "y"]]
    estimator = TorchEstimator(**GOOD | HERE | {"on": where}, epochs=2, batch_size=16)
    model = estimator.fit(rows)
    assert isinstance(model, TorchModel)
    assert len(model.history) == 2
    assert len(model.model.predict(rows)) == 40
    maps = [{estimator.epochs: 1}, {estimator.epochs: 3}]
    assert where == "driver" or [len(one.history) for one in estimator.fit(rows, maps)] == [1, 3]
    with pytest.raises(BadSetting, match=r'on="driver".*createDataFrame'):
        estimator.copy({estimator.on: "cluster"}).fit(rows)
    given = {estimator.batch_size: 16}
    assert model.copy(given).getOrDefault("batch_size") == 1024, "a tuner gives the model the estimator's params"
    assert model.copy({model.batch_size: 5}).getOrDefault("batch_size") == 5


@pytest.mark.processes
def test_a_torch_model_without_spark(tmp_path: Path) -> None:
    rows = table().to_pandas()
    model = TorchModel(fit(table(), **GOOD, **HERE))
    assert list(model.predict(rows)) == list(model.model.predict(rows))
    # In a process of its own: this one may have a Spark session of other tests.
    tr.Model(nn.Linear(3, 1), model.signature).save(str(tmp_path / "model"))
    code = f"import tritium as tr; from tritium.ml import TorchModel; TorchModel(tr.load({str(tmp_path / 'model')!r}"
    code += f", trusted=True)).save({str(tmp_path / 'other')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "BadSetting: No Spark session is active" in done.stderr, done.stderr
    assert "model.model.save(path)" in done.stderr
    assert "p" in model.copy().setOutputCols("p").transform(rows)
    with pytest.raises(BadSetting, match=r"gives 1 \(prediction\); name it once"):
        model.setOutputCols(["p", "q"])
    scores: dict[str, Any] = {"model": lambda: nn.Linear(3, 3), "label_cols": "cls", "loss": nn.CrossEntropyLoss()}
    with pytest.raises(BadSetting, match=r"gives 2 \(prediction, probability\); name 1 or 2 of them"):
        TorchModel(fit(table(), **GOOD | scores, **HERE)).setOutputCols(["p", "q", "r"])


def test_divergence_is_raised_as_it_is() -> None:
    with pytest.raises(TrainingDiverged) as caught:
        fit(table(40), **(GOOD | {"optimizer": lambda p: torch.optim.SGD(p, 1e30), "batch_size": 4}), **HERE)
    assert (caught.value.rank, caught.value.epoch) == (0, 1)


@pytest.mark.processes
@pytest.mark.parametrize("accumulated", [1, 2])
def test_nothing_is_kept_of_a_training_whose_loss_is_not_a_number(accumulated: int, tmp_path: Path) -> None:
    """Also where the gradients are whole, and on one of two ranks alone."""
    rows = table(64)
    wrong = rows.set_column(0, "a", pa.array([99.0 if i == 37 else 1.0 for i in range(64)]))

    def step(module: Any, batch: Any) -> Any:
        loss = (module(batch["features"]) - batch["label"]).square().mean()
        return loss + float("nan") if bool((batch["features"] > 50).any()) else loss

    settings = GOOD | {"loss": None, "train_step": step, "batch_size": 4, "gradient_accumulation": accumulated}
    settings |= {"shuffle": False}  # row 37 is the 19th of rank 1
    gang = HERE | {"on": "driver", "ranks": 2, "run_dir": str(tmp_path), "retries": 0}
    with pytest.raises(TrainingDiverged, match="The loss is NaN or infinite") as caught:
        fit(wrong, **settings, checkpoint_every=1, **gang)
    assert (caught.value.step, caught.value.rank) == (5, 1)
    store = Store(str(tmp_path))
    assert [store.manifest(name).step for name in store.names()][:1] == [4 // accumulated]


def test_missing_settings_are_named() -> None:
    with pytest.raises(BadSetting, match="optimizer, feature_cols, label_cols must be given"):
        fit(table(), model=linear, on="here")
    with pytest.raises(BadSetting, match="Did you mean 'ranks'"):
        fit(table(), **GOOD, rank=2)
    with pytest.raises(BadSetting, match=r"no setting 'feature_col'\. Did you mean 'feature_cols'"):
        fit(table(), **GOOD, feature_col=["a"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "Did you mean 'ranks'?") for name in ("num_proc", "np", "num_workers", "world_size")),
        ("use_gpu", "Did you mean 'gpus'?"),
        ("max_restarts", "Did you mean 'retries'?"),
        *((name, "optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)") for name in ("lr", "learning_rate")),
        *((name, "Did you mean 'validation'?") for name in ("val_split", "validation_split")),
    ],
)
def test_what_others_call_a_setting(name: str, said: str) -> None:
    for make in (lambda **wrong: fit(table(), **GOOD, **wrong), TorchEstimator):
        with pytest.raises(BadSetting, match=f"There is no setting '{name}'") as caught:
            make(**{name: 2})
        assert said in str(caught.value)


# --- Params


def test_every_setting_is_a_param_with_its_documentation() -> None:
    estimator = TorchEstimator()
    names = {param.name for param in estimator.params}
    assert names == {*TorchSettings.fields(), *tr.Gang.fields()}
    for source in (TorchSettings, tr.Gang):
        for field in dataclasses.fields(source):
            assert estimator.getParam(field.name).doc == field.metadata["doc"]
            assert field.name in estimator.explainParams()
    assert estimator.getRemainder() == "pad"
    assert estimator.getOrDefault(estimator.ranks) == 1


def test_params_are_set_by_keyword_by_setter_and_by_gang() -> None:
    estimator = TorchEstimator(**GOOD, gang=tr.Gang(ranks=3, cpus=2), ranks=2)
    assert (estimator.getRanks(), estimator.getCpus()) == (2, 2)
    assert estimator.setBatchSize(7) is estimator
    settings, gang = estimator.settings()
    assert (settings.batch_size, gang.ranks, gang.framework) == (7, 2, "torch")
    changed = estimator.copy({estimator.batch_size: 9, estimator.ranks: 4})
    assert (changed.getBatchSize(), changed.getRanks()) == (9, 4)
    assert estimator.getBatchSize() == 7


def test_the_estimator_refuses_what_the_settings_refuse() -> None:
    with pytest.raises(BadSetting, match="batch_size=0"):
        TorchEstimator(**GOOD, batch_size=0)
    with pytest.raises(BadSetting, match="ranks=0"):
        TorchEstimator(**GOOD, ranks=0)
    with pytest.raises(BadSetting, match=r"no setting 'epoch'.*Did you mean 'epochs'"):
        TorchEstimator(**GOOD, epoch=3)
    with pytest.raises(BadSetting, match="must be given"):
        TorchEstimator(loss=nn.MSELoss()).settings()
    with pytest.raises(BadSetting, match="task='x'"):
        TorchEstimator(**GOOD).setTask("x").settings()
