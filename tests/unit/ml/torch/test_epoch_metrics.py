"""The sums of an epoch: metrics whose states torchmetrics only stacks, wrappers, and rows that only pad a batch."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tritium.data.batch import Batch
from tritium.ml.settings import LABEL
from tritium.ml.torch.epoch_metrics import EpochMetrics
from tritium.ml.torch.ranks import Ranks

ROWS = 24
ALONE = Ranks(0, 1, torch.device("cpu"))


def values() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, generator=random)
    return x, x + 0.5 * torch.randn(ROWS, generator=random)


def metrics() -> dict[str, Any]:
    import torchmetrics

    return {
        "corr": torchmetrics.PearsonCorrCoef(),
        "mse": torchmetrics.MeanSquaredError(),
        "each": torchmetrics.wrappers.MultioutputWrapper(torchmetrics.PearsonCorrCoef(), 1),
        "by_class": torchmetrics.ClasswiseWrapper(
            torchmetrics.classification.MulticlassAccuracy(2, average=None), labels=["low", "high"]
        ),
        "sum": torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError(),
    }


def batch_of(label: torch.Tensor, rows: int | None = None) -> Batch:
    rows = len(label) if rows is None else rows
    return Batch({LABEL: label}, scale=1.0, rows=rows, total=rows, step=0, epoch=0)


def add(metrics: EpochMetrics, rows: slice) -> None:
    x, y = (value[rows, None] for value in values())
    metrics.add(batch_of(y), nn.functional.mse_loss(x, y), x)


def correlation() -> float:
    return float(torch.corrcoef(torch.stack(values()))[0, 1])


def chosen() -> dict[str, Any]:
    from .own_metrics import Halves

    return {name: metric for name, metric in metrics().items() if name != "by_class"} | {"upper": Halves()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_states_of_all_ranks_of_a_checkpoint_count_on_one(ranks: int) -> None:
    """Also twice in a row: a checkpoint of a training that had itself taken over others' states."""
    states: list[Any] = []
    for rank in range(ranks):
        before = EpochMetrics(chosen(), ALONE)
        for start in range(rank, 12, ranks):
            add(before, slice(start, start + 1))
        states.append(pickle.loads(pickle.dumps(before.state())))
    once = EpochMetrics(chosen(), ALONE)
    once.load_state(states)
    add(once, slice(12, 18))
    again = EpochMetrics(chosen(), ALONE)
    again.load_state([pickle.loads(pickle.dumps(once.state())), None])
    add(again, slice(18, ROWS))
    found = again.means()
    x, y = values()
    assert found["corr"] == pytest.approx(correlation(), rel=1e-4)
    assert found["each"] == pytest.approx([correlation()], rel=1e-4)
    assert found["mse"] == pytest.approx(float((x - y).square().mean()), rel=1e-4)
    assert found["loss"] == pytest.approx(found["mse"], rel=1e-4)
    assert found["sum"] == pytest.approx(float((x - y).square().mean() + (x - y).abs().mean()), rel=1e-4)
    assert found["upper"] == pytest.approx(float(x[y > 0].sum()), rel=1e-4)


def test_a_wrapper_that_shows_the_states_of_the_metric_in_it() -> None:
    x, y = values()
    label, score = (y > 0).long(), torch.stack([-x, x], 1)
    before = EpochMetrics({"by_class": metrics()["by_class"]}, ALONE)
    before.add(batch_of(label[:9]), torch.tensor(0.0), score[:9])
    after = EpochMetrics({"by_class": metrics()["by_class"]}, ALONE)
    after.load_state([before.state()])
    after.add(batch_of(label[9:]), torch.tensor(0.0), score[9:])
    right = (score.argmax(1) == label).float()
    found = {name: value for name, value in after.means(uneven=True).items() if name != "loss"}
    expected = [float(right[label == 0].mean()), float(right[label == 1].mean())]
    assert list(found.values()) == pytest.approx(expected)


def test_a_row_that_only_pads_counts_for_nothing_whatever_its_loss() -> None:
    def of_several(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).std()  # NaN for one row

    x, y = values()
    found = EpochMetrics({"spread": of_several}, ALONE)
    found.add(batch_of(y), (x - y).std(), x)
    found.add(batch_of(y[:1], rows=0), (x - y)[:1].mean() + math.nan, x[:1])
    entry = found.entry(1)
    assert entry["loss"] == entry["spread"] == pytest.approx(float((x - y).std()))
    assert (entry["rows"], entry["rows_padded"]) == (ROWS, 1)
