"""What a user's functions do wrong is said on the driver, before a rank starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torchmetrics
from torch import nn

import tritium as tr
from tritium.errors import BadData, BadSetting
from tritium.ml import TorchSettings, fit
from tritium.ml.fitting import Plan, prepare
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


@pytest.mark.parametrize("optimizer", [needs_library, needs_gang])
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
