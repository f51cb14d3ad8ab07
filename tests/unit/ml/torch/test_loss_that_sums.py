"""A loss that sums over rows is refused before anything starts; others raise no false alarm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional

from tritium.errors import BadSetting
from tritium.gang.settings import Gang
from tritium.ml import TorchSettings, fit
from tritium.ml.fitting import prepare
from tritium.ml.torch.backend import TorchBackend
from tritium.ml.torch.losses import refuse_sum

ROWS = 24


def table() -> pa.Table:
    x = np.random.default_rng(1).normal(size=(ROWS, 3))
    columns = {f"x{i}": x[:, i] for i in range(3)} | {"y": np.abs(x[:, 0]), "cls": np.arange(ROWS) % 4}
    return pa.table(columns | {"vector": [row.tolist() for row in x]})


def settings(loss: Any, **changes: Any) -> dict[str, Any]:
    base = {
        "model": lambda: nn.Linear(3, 1),
        "loss": loss,
        "optimizer": lambda p: torch.optim.SGD(p, 0.01),
        "feature_cols": ["x0", "x1", "x2"],
        "label_cols": ["y"],
        "verbose": False,
    }
    return base | changes


def planned(loss: Any, **changes: Any) -> Any:
    return prepare(TorchBackend(), table(), TorchSettings(**settings(loss, **changes)), Gang(ranks=1, on="here"))


SUMS: dict[str, Any] = {
    "partial": functools.partial(functional.mse_loss, reduction="sum"),
    "own": lambda output, label: (output - label).abs().sum(),
    "divided by a constant": lambda output, label: (output - label).square().sum() / 32,
    "with a regularizer": lambda output, label: functional.l1_loss(output, label, reduction="sum") + 0.7,
}


@pytest.mark.parametrize("kind", SUMS)
def test_a_loss_that_sums_is_refused_with_what_to_write(kind: str) -> None:
    with pytest.raises(BadSetting, match=r'sums over the rows.*reduction="mean".*\.sum\(\) / len\(label\)'):
        planned(SUMS[kind])
    with pytest.raises(BadSetting, match="sums over the rows"):
        planned(SUMS[kind], model=lambda: nn.Linear(3, 1, bias=False))
    with pytest.raises(BadSetting, match="sums over the rows"):
        refuse_sum(SUMS[kind], torch.randn(5, 1), torch.randn(5, 1))


def test_a_class_loss_that_sums_is_refused() -> None:
    loss = functools.partial(functional.cross_entropy, reduction="sum")
    with pytest.raises(BadSetting, match="loss=partial sums over the rows: it is"):
        planned(loss, model=lambda: nn.Linear(3, 4), label_cols="cls", task="classification")


def test_where_the_shapes_are_known_to_the_ranks_alone_they_refuse_it() -> None:
    """The loss of one row of zeros is none, whatever the label: only real rows show it."""
    loss = lambda output, label: (output * label).square().sum()  # noqa: E731
    shown = settings(loss, feature_cols="vector", model=lambda: nn.Linear(3, 1, bias=False))
    planned(loss, feature_cols="vector", model=lambda: nn.Linear(3, 1, bias=False))
    with pytest.raises(BadSetting, match="sums over the rows"):
        fit(table(), **shown, ranks=1, on="here", progress=False)


class Anneals(nn.Module):
    """A loss that weighs its second term by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Any, label: Any) -> Any:
        self.calls += 1
        return self.calls * functional.mse_loss(output, label)


def counted() -> Callable[..., Any]:
    calls = [0]

    def loss(output: Any, label: Any) -> Any:
        calls[0] += 1
        return calls[0] * functional.mse_loss(output, label)

    return loss


def contrastive(output: Any, label: Any) -> Any:
    near = functional.normalize(output, dim=1) @ functional.normalize(output, dim=1).T
    return functional.cross_entropy(near, torch.arange(len(output)))


def noisy(output: Any, label: Any) -> Any:
    return functional.mse_loss(output + torch.randn_like(output), label)


def needs_two(output: Any, label: Any) -> Any:
    assert len(output) > 1
    return (output[1:] - label[:-1]).square().sum()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


classes: dict[str, Any] = {"model": lambda: nn.Linear(3, 4), "label_cols": "cls", "task": "classification"}
FINE: dict[str, tuple[Any, dict[str, Any]]] = {
    "mean squares": (nn.MSELoss(), {}),
    "per row": (functools.partial(functional.mse_loss, reduction="none"), {}),
    "sum over the outputs of a row": (lambda o, y: (o - y).square().sum(1).mean(), {}),
    "root": (lambda o, y: (o - y).square().mean().sqrt(), {}),
    "batchmean": (lambda o, y: functional.kl_div(o.log_softmax(1), y.softmax(1), reduction="batchmean"), {}),
    "batch norm and dropout": (nn.MSELoss(), {"model": normed}),
    "ignored": (nn.CrossEntropyLoss(ignore_index=0), classes),
    "weights of classes": (nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 2.0, 3.0])), classes),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), classes),
    "contrastive": (contrastive, {"model": lambda: nn.Linear(3, 8), "label_cols": "cls", "task": None}),
    "random": (noisy, {}),
    "counts its calls in a buffer": (Anneals(), {}),
    "counts its calls": (counted(), {}),
    "needs two rows": (needs_two, {}),
    "always zero": (lambda o, y: 0 * o.sum(), {}),
}


@pytest.mark.parametrize("kind", FINE)
def test_no_false_alarm(kind: str) -> None:
    loss, changes = FINE[kind]
    planned(loss, **changes)
    output = torch.randn(5, 4 if changes is classes else 8 if kind == "contrastive" else 1)
    label = torch.arange(5) % 4 if changes.get("label_cols") == "cls" else torch.randn(5, 1)
    refuse_sum(loss, output, label)


def test_looking_at_a_loss_changes_neither_its_buffers_nor_random_numbers() -> None:
    loss = Anneals()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    refuse_sum(loss, torch.randn(3, 1), torch.randn(3, 1))
    torch.manual_seed(1)
    torch.randn(3, 1), torch.randn(3, 1)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    refuse_sum(noisy, torch.randn(3, 1), torch.randn(3, 1))
    assert torch.equal(torch.get_rng_state(), after)
    assert loss.calls == 0


class Counts:
    """A loss with a state in an attribute, which keeps its arguments."""

    def __init__(self) -> None:
        self.calls = 0
        self.labels: list[Any] = []

    def __call__(self, output: Any, label: Any) -> Any:
        self.calls += 1
        self.labels.append(label.flatten().tolist())
        return functional.mse_loss(output, label)


def test_looking_at_a_loss_leaves_the_state_in_its_attributes_alone() -> None:
    loss = Counts()
    refuse_sum(loss, torch.randn(3, 1), torch.randn(3, 1))
    assert loss.calls == 0


def test_a_loss_is_looked_at_with_labels_that_there_are_alone() -> None:
    """A class or a probability that is none is an assertion on a GPU, which ends the process."""
    seen: list[float] = []

    def loss(output: Any, label: Any) -> Any:
        seen.extend(label.flatten().tolist())
        return functional.mse_loss(output, label)

    refuse_sum(loss, torch.rand(4, 1), torch.tensor([[1.0], [0.0], [0.0], [1.0]]))
    assert set(seen) == {0.0, 1.0}


def test_a_loss_that_sums_differences_is_found_where_the_first_of_them_is_zero() -> None:
    for kind in SUMS:
        with pytest.raises(BadSetting, match="sums over the rows"):
            refuse_sum(SUMS[kind], torch.zeros(5, 1), torch.arange(5.0)[:, None])
        with pytest.raises(BadSetting, match="sums over the rows"):
            refuse_sum(SUMS[kind], torch.zeros(2, 1), torch.zeros(2, 1))
