"""What a user's functions do wrong is said on the driver, before a rank starts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import torchmetrics
from PIL import Image
from torch import nn

import tritium as tr
from tritium.errors import BadData, BadSetting
from tritium.ml import TorchSettings, fit
from tritium.ml.fitting import Plan, prepare, run
from tritium.ml.torch.backend import TorchBackend

COLUMNS: dict[str, Any] = {"feature_cols": ["a", "b"], "label_cols": ["y"], "verbose": False}
TORCH: dict[str, Any] = {"model": nn.Linear(2, 1), "loss": nn.MSELoss(), "optimizer": torch.optim.SGD, **COLUMNS}
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none"}


def rows(count: int = 20) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {name: draw.random(count) for name in ("a", "b", "y")}
    return pd.DataFrame(columns | {"c": np.arange(count) % 3, "z": (np.arange(count) % 2).astype(float)})


def planned(frame: Any = None, **changes: Any) -> Plan:
    rows_ = rows() if frame is None else frame
    return prepare(TorchBackend(), rows_, TorchSettings(**TORCH | changes), tr.Gang(on="here"))


def same_random_state(call: Callable[[], Any]) -> bool:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    call()
    return torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()  # type: ignore[index]


# ---- the optimizer takes the parameters or the module


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda m: torch.optim.SGD(m.parameters(), 0.05),
        lambda net: torch.optim.SGD([{"params": p} for _, p in net.named_parameters()], 0.05),
        lambda module: torch.optim.SGD(module, 0.05),
        lambda model: torch.optim.SGD(model.parameters(), 0.05),
    ],
    ids=["module", "groups", "parameters", "by name"],
)
def test_an_optimizer_is_given_what_it_works_with_whatever_its_argument_is_called(optimizer: Any) -> None:
    usual = fit(rows(), **TORCH | {"optimizer": lambda p: torch.optim.SGD(p, 0.05)}, **HERE)
    other = fit(rows(), **TORCH | {"optimizer": optimizer}, **HERE)
    assert other.history[-1]["loss"] == usual.history[-1]["loss"]
    assert torch.equal(other.module.weight, usual.module.weight)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (
            lambda m: torch.optim.SGD(m.head.parameters(), 0.1),
            "fails, called with the model's parameters: AttributeError: 'generator' object has no attribute 'head'. "
            "Called with the model itself it raises AttributeError: 'Linear' object has no attribute 'head'",
        ),
        (lambda p: torch.optim.SGD(p, -1.0), "parameters: ValueError: Invalid learning rate: -1.0. Give a function of"),
    ],
    ids=["neither", "value"],
)
def test_an_optimizer_that_works_with_neither_is_refused(optimizer: Any, says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        planned(optimizer=optimizer)
    assert says in str(caught.value)


def needs_library(parameters: Any) -> Any:
    import a_library_of_the_ranks  # type: ignore[import-not-found]

    return a_library_of_the_ranks.Adam(parameters)


def needs_gang(parameters: Any) -> Any:
    torch.distributed.get_world_size(torch.distributed.new_group())
    return torch.optim.SGD(parameters, 0.1)


def needs_gpu(parameters: Any) -> Any:
    raise RuntimeError("FusedAdam requires cuda extensions")


@pytest.mark.parametrize("optimizer", [needs_library, needs_gang, needs_gpu])
def test_an_optimizer_that_only_ranks_can_make_is_left_to_them(optimizer: Any) -> None:
    planned(optimizer=optimizer)


# ---- other functions of torch


def two_classes(output: Any, label: Any) -> float:
    if len(set(label.flatten().tolist())) < 2:
        raise ValueError("only one class")
    return 0.5


def decays(step: int) -> float:
    return 1.0 / unknown_name  # type: ignore[name-defined,no-any-return] # noqa: F821


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr_scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, decays)}, "NameError: name 'unknown_name'"),
        ({"lr_scheduler": lambda o, steps: torch.optim.lr_scheduler.OneCycleLR(o, steps=steps)}, "100 steps: TypeErr"),
        ({"metrics": {"m": lambda output, label: output[:, 1].mean()}}, "The metric 'm' can't take what there is: Ind"),
        ({"metrics": {"m": lambda output, label: output - label}}, "output with shape [] doesn't match"),
        ({"metrics": [torchmetrics.classification.MulticlassAUROC(3)]}, "'multiclass_auroc' can't take"),
        ({"train_step": lambda net, batch: net.loss(batch), "loss": None}, "train_step=<lambda> fails: AttributeError"),
        (
            {"eval_step": lambda net, batch: net(batch["x"]), "validation": 0.5},
            "eval_step asks for batch['x'], and a batch has 'features', 'label'",
        ),
    ],
    ids=["lambda", "steps", "metric", "rows", "torchmetrics", "step", "eval_step"],
)
def test_a_function_that_fails_for_all_values_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((BadData, BadSetting)) as caught:
        planned(**changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {"auc": two_classes}, "label_cols": ["z"]},
        {"metrics": {"m": lambda output, label: 1.0 / float(label.sum())}},
        {"lr_scheduler": lambda o, steps: torch.optim.lr_scheduler.StepLR(o, steps // 1000)},
        {"metrics": {"m": torchmetrics.MeanAbsoluteError()}},
    ],
    ids=["one class", "no sum", "few steps", "state"],
)
def test_a_function_that_fails_for_zeros_alone_is_not_refused(changes: dict[str, Any]) -> None:
    assert same_random_state(lambda: planned(**changes))


def test_a_metric_keeps_its_state() -> None:
    metric = torchmetrics.MeanAbsoluteError()
    planned(metrics={"m": metric})
    assert metric._update_count == 0


def test_a_decode_that_takes_no_value() -> None:
    with pytest.raises(BadSetting, match=r"decode=\{'a': <lambda>\} takes nothing; it is called with \(value\)."):
        TorchSettings(**TORCH | {"decode": {"a": lambda: 1}})


# ---- inputs


class Squeezes(nn.Module):
    """A module that takes away the row of a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(x).squeeze()


class Named(nn.Module):
    """A module that returns an object with names, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return collections.OrderedDict(logits=self.layer(x))


class LastState(nn.Module):
    """A module whose second output has no row for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(1, 3, batch_first=True)

    def forward(self, x: Any) -> Any:
        output, state = self.layer(x[:, :, None])
        return output.mean((1, 2)), state


class Together(nn.Module):
    """A module of an image and of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = conv(), nn.Linear(4, 1)

    def forward(self, image: Any, v: Any) -> Any:
        return self.conv(image) + self.layer(v)


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1))


def image(content: bytes) -> Image.Image:
    return Image.frombytes("RGB", (4, 4), content)


IMAGES: dict[str, Any] = {"feature_cols": "image", "decode": {"image": image}}
INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "ids": (
        {"feature_cols": "ids", "model": lambda: nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(10, 1))},
        "It takes features as [batch, 5] int64: df.withColumn('ids', F.col('ids').cast('array<bigint>')) in Spark, "
        "lists of int in pandas.",
    ),
    "one id": (
        {"feature_cols": "id", "model": lambda: nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 1))},
        "It takes features as [batch] int64: df.withColumn('id', F.col('id').cast('bigint')) in Spark, int in pandas.",
    ),
    "packed ids": (
        {"feature_cols": ["c", "d"], "model": lambda: nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(4, 1))},
        "It takes features as [batch, 2] int64: columns that are packed become floats; make one array of integers, "
        "df.withColumn('ids', F.array('c', 'd').cast('array<bigint>')), and give feature_cols='ids'.",
    ),
    "integers": (
        {"feature_cols": "counts", "model": lambda: nn.Linear(4, 1)},
        "It takes features as [batch, 4] float32: transform=lambda x: {'features': x['features'].float()}.",
    ),
    "image": (
        {"model": conv, **IMAGES},
        "It takes features as [batch, 3, 4, 4] float32: transform=lambda x: {'features': "
        "x['features'].permute(0, 3, 1, 2) / 255}.",
    ),
    "bytes": (
        {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 1)), **IMAGES},
        "It takes features as [batch, 4, 4, 3] float32: transform=lambda x: {'features': x['features'] / 255}.",
    ),
    "doubles": (
        {"model": lambda: nn.Linear(4, 1), "feature_cols": "image", "decode": {"image": lambda content: np.ones(4)}},
        "It takes features as [batch, 4] float32: transform=lambda x: {'features': x['features'].float()}.",
    ),
    "transformed": (
        {"model": lambda: nn.Linear(4, 1), "feature_cols": "v", "transform": lambda x: {"z": x["features"].double()}},
        "It takes z as [batch, 4] float32: let transform return z.float().",
    ),
    "flat": (
        {"model": conv, "feature_cols": "flat"},
        "It takes features as [batch, 3, 4, 4] float32: transform=lambda x: {'features': "
        "x['features'].unflatten(1, (3, 4, 4))}.",
    ),
    "of several": (
        {"model": Together, "feature_cols": {"image": "image", "v": "v"}, "decode": {"image": image}},
        "transform=lambda x: {**x, 'image': x['image'].permute(0, 3, 1, 2) / 255}.",
    ),
    "other length": (
        {"model": lambda: nn.Linear(5, 1), "feature_cols": "v"},
        "It was called with\n  - features [batch, 4] float32 of column 'v'",
    ),
    "output object": (
        {"model": Named, "feature_cols": "v"},
        "The module returns an OrderedDict of 1, and loss=MSELoss can't take it",
    ),
    "squeezes": (
        {"model": Squeezes, "feature_cols": "v", "label_cols": "c", "loss": lambda o, y: (o - y).square().mean()},
        "given one row alone it returns [], not [1] (prediction). A batch may have one row: name the dimension that",
    ),
    "state": (
        {"model": LastState, "feature_cols": "v", "loss": lambda o, y: o[0].square().mean()},
        "The model's forward returns [1, 2, 3] for a batch of 2 rows in eval mode (output_1)",
    ),
}


def inputs(count: int = 8) -> pa.Table:
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "ids": draw.integers(0, 9, (count, 5)).astype(np.float64).tolist(),
        "id": draw.integers(0, 9, count).astype(np.float64),
        "counts": draw.integers(0, 9, (count, 4)).tolist(),
        "flat": draw.random((count, 48)).tolist(),
        "v": draw.random((count, 4)).tolist(),
        "image": [draw.bytes(48) for _ in range(count)],
    }
    columns |= {"c": np.arange(count) % 3, "d": np.arange(count) % 2, "y": draw.random(count)}
    return pa.table(columns)


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_that_a_module_does_not_take_are_refused_with_the_line_to_write(case: str) -> None:
    changes, says = INPUTS[case]
    with pytest.raises(BadData) as caught:
        planned(inputs(), **changes)
    assert says in str(caught.value)


@pytest.mark.parametrize("case", [case for case in INPUTS if case not in ("one id", "packed ids")])  # shapes are known
def test_where_only_the_ranks_see_the_rows_they_are_refused_in_the_same_words(case: str) -> None:
    changes, _ = INPUTS[case]
    with pytest.raises(BadData) as known:
        planned(inputs(), **changes)
    plan = planned(inputs().slice(0, 0), **changes)
    data = {"train": dataclasses.replace(plan.data["train"], frame=inputs())}
    with pytest.raises(BadData) as caught:
        run(dataclasses.replace(plan, gang=tr.Gang(**HERE), data=data))
    assert str(caught.value) == str(known.value)


@pytest.mark.parametrize("case", ["integers", "image", "bytes", "doubles", "flat", "of several"])
def test_the_line_to_write_works(case: str) -> None:
    changes, says = INPUTS[case]
    transform = eval(says[says.index("lambda") : -1])
    model = fit(inputs(), **TORCH | changes, transform=transform, **HERE)
    assert np.isfinite(model.history[-1]["loss"])
    assert model.predict(inputs()).shape == (8,)


@pytest.mark.processes
def test_the_first_rank_tries_and_no_other_fails_before_it() -> None:
    changes, says = INPUTS["flat"]
    plan = planned(inputs().slice(0, 0), **changes)
    data = {"train": dataclasses.replace(plan.data["train"], frame=inputs())}
    gang = tr.Gang(ranks=2, on="driver", progress=False, output="none", framework="torch", retries=0)
    with pytest.raises(BadData) as caught:
        run(dataclasses.replace(plan, gang=gang, data=data))
    assert says in str(caught.value)


def test_a_trial_in_a_rank_changes_nothing_of_the_training() -> None:
    """Neither random numbers nor the buffers of a loss."""

    def noisy(x: Any) -> Any:
        return {"features": x["features"] + float(np.random.random()) + torch.rand(())}

    given: dict[str, Any] = {"model": lambda: nn.Linear(4, 1), "feature_cols": "v", "transform": noisy}
    plan = planned(inputs(), loss=Counts(), **given)
    unknown = planned(inputs().slice(0, 0), loss=Counts(), **given)
    histories = [
        run(dataclasses.replace(one, gang=tr.Gang(**HERE), data=plan.data)).history[0]["loss"]
        for one in (plan, unknown)
    ]
    assert histories[0] == histories[1]


class Counts(nn.Module):
    """A loss that weighs by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Any, label: Any) -> Any:
        self.calls += 1
        return self.calls * (output - label).square().mean()


def test_a_loss_that_cannot_be_copied_is_tried_itself() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = torch.ones(1, requires_grad=True) * scale

        def forward(self, output: Any, label: Any) -> Any:
            assert self.scale > 0, "no scale"
            return (self.scale.detach() * (output - label)).square().mean()

    assert fit(rows(), **TORCH | HERE | {"loss": Scaled(2.0)}).history
    with pytest.raises(BadData, match=r"loss=Scaled.* can't take what there is: AssertionError: no scale"):
        fit(rows(), **TORCH | HERE | {"loss": Scaled(0.0)})


def test_a_batch_of_one_row_with_which_the_model_can_not_be_trained_is_refused_before_the_first_step() -> None:
    normed = lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))  # noqa: E731
    given: dict[str, Any] = TORCH | {"model": normed, **HERE}
    for size in (4, 1):
        with pytest.raises(BadData, match=r"An epoch has a batch of one row \(rows per rank: 21"):
            fit(rows(21), **given, batch_size=size)
    for size, remainder in ((4, "drop"), (5, "repeat"), (6, "pad")):
        assert fit(rows(21), **given, batch_size=size, remainder=remainder).history
    assert fit(rows(21), **given | {"model": nn.Linear(2, 1)}, batch_size=4).history
