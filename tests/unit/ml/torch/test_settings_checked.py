"""Settings that were accepted, and failed after the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tritium.errors import BadSetting
from tritium.ml import EarlyStopping, TorchEstimator

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}


def frame(rows: int = 40) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    found = pd.DataFrame({"a": draw.random(rows, np.float32), "b": draw.random(rows, np.float32)})
    return found.assign(y=found.a + found.b, z=found.a - found.b, w=np.ones(rows), s=np.zeros(rows))


def net(**settings: Any) -> TorchEstimator:
    given = {"model": torch.nn.Linear(2, 1), "loss": torch.nn.MSELoss(), "optimizer": torch.optim.SGD, "epochs": 1}
    return TorchEstimator(**given | {"feature_cols": ["a", "b"], "label_cols": ["y"], **HERE} | settings)


def test_a_null_that_becomes_nan_does_not_make_another_training(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nulls": {"a": float("nan")}, "nan": "keep", "run_dir": str(tmp_path), "check": "off"}
    net(**settings).fit(frame())
    assert len(net(**settings, epochs=2).fit(frame()).history) == 2
    with pytest.raises(BadSetting, match=r"nulls: {'a': 0.0}, was {'a': 'NaN'}"):
        net(**settings | {"nulls": {"a": 0.0}}, epochs=3).fit(frame())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prediction_device": torch.device("cpu")}, "must be a device, as a string."),
        ({"prediction_col": None}, "prediction_col=None must be a column, as a string."),
        ({"probability_col": 5}, "probability_col=5 must be a column, as a string."),
        ({"prediction_col": "p", "probability_col": "p"}, "are both 'p'; they are two columns."),
    ],
    ids=["device", "none", "number", "same"],
)
def test_settings_of_predictions_are_checked_before_the_training(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        net(**settings).fit(frame())
    assert says in str(caught.value)


SEVERAL = {"all": torch.optim.SGD([torch.zeros(1)], lr=0.1)}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": SEVERAL}, "optimizer is a dict."),
        ({"optimizer": list(SEVERAL.values())}, "optimizer is a list."),
        ({"optimizer": lambda module: SEVERAL}, "optimizer=<lambda> returned a dict, and must return one"),
        (
            {"optimizer": lambda module: tuple(SEVERAL.values())},
            "returned a tuple, and must return one",
        ),
        (
            {"loss": None, "train_step": lambda module, batch, optimizer: 0},
            "train_step=<lambda> takes module, batch, optimizer; it is called with (module, batch).",
        ),
    ],
    ids=["dict", "list", "function-of-dict", "function-of-tuple", "train_step"],
)
def test_several_optimizers_are_refused_with_the_page_that_helps(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        net(**settings).fit(frame())
    assert says in str(caught.value)
    assert "TorchEstimator trains with one optimizer" in str(caught.value)
    page = str(caught.value).partition("LightningEstimator's: ")[2].partition(" ")[0]
    assert "automatic_optimization = False" in (Path(__file__).parents[4] / page).read_text()


def test_a_monitor_that_is_not_in_the_history() -> None:
    rule = EarlyStopping(monitor="zz", patience=1)
    with pytest.raises(BadSetting, match="early_stopping monitors 'zz'; the history will have"):
        net(early_stopping=rule, epochs=3).fit(frame())
