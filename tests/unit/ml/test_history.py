"""What callbacks put into the history of a training is saved with the model, or refused at its epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadSetting
from tritium.ml import Callback, fit


class Puts(Callback):
    """A callback that puts values into the history."""

    def __init__(self, at_end: dict[str, Any] | None = None, **values: Any) -> None:
        self.values, self.at_end = values, at_end or {}

    def on_epoch_end(self, state: Any) -> None:
        state.history[-1].update(self.values)

    def on_train_end(self, state: Any) -> None:
        state.history[-1].update(self.at_end)


def trained(callback: Callback, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "loss": nn.MSELoss(),
        "optimizer": lambda p: torch.optim.SGD(p, 0.05),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "verbose": False,
        "on": "here",
        "progress": False,
        "output": "none",
        "callbacks": [callback],
    }
    return fit(pd.DataFrame({"x": np.arange(8.0), "y": np.arange(8.0)}), **settings | changes)


def test_numbers_of_numpy_and_torch_are_saved_as_numbers(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "f1": np.float32(0.5),
        "count": np.int64(3),
        "tensor": torch.tensor(0.25, requires_grad=True),
        "by_class": {"low": np.array([1, 2]), "high": [torch.tensor(1.5)]},
        "pair": (1, 2),
        "text": "best",
    }
    model = trained(Puts(**given, at_end={"last": np.float32(2)}))
    (entry,) = model.history
    assert {n: entry[n] for n in given} == given | {"by_class": {"low": [1, 2], "high": [1.5]}}
    assert [type(entry[n]) for n in ("f1", "count", "tensor", "pair", "last")] == [float, int, float, tuple, float]
    model.save(str(tmp_path / "model"))
    assert tr.load(str(tmp_path / "model"), trusted=True).history[0]["f1"] == 0.5


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, [len]])
def test_what_no_history_can_hold_is_refused_at_its_epoch(value: Any) -> None:
    with pytest.raises(BadSetting, match=r"'extra' into the history of epoch 1, a .* can't hold") as caught:
        trained(Puts(extra=value), epochs=3)
    assert (caught.value.key, caught.value.epoch) == ("extra", 1)
