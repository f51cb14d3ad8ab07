"""What an estimator, a model and a gang print: their settings where they differ from the defaults, and no secrets."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import torch
from torch import nn

import tritium as tr
from tritium.ml import LightGBMRegressor, TorchEstimator
from tritium.shown import shown


def make_net() -> nn.Module:
    return nn.Linear(2, 1)


def test_an_estimator() -> None:
    estimator = TorchEstimator(
        model=make_net,
        loss=nn.MSELoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        feature_cols=["a", "b"],
        label_cols=["y"],
        batch_size=16,
        seed=0,
        ranks=4,
        env={"TOKEN": "secret"},
        run_dir="s3://key:secret@bucket/runs",
    )
    assert repr(estimator) == (
        "TorchEstimator(model=make_net, optimizer=partial, feature_cols=['a', 'b'], label_cols=['y'], "
        "batch_size=16, loss=MSELoss, ranks=4, env=['TOKEN'], run_dir='s3://***@bucket/runs')"
    )
    page = estimator._repr_html_()
    assert "<h3>TorchEstimator</h3>" in page
    assert "<tr><td>batch_size</td><td>16</td></tr>" in page
    assert estimator.uid not in page
    assert "secret" not in page
    assert repr(estimator.copy({estimator.getParam("batch_size"): 8})).count("batch_size=8") == 1
    assert repr(LightGBMRegressor(feature_cols=["a"], label_cols="y", num_iterations=7)) == (
        "LightGBMRegressor(feature_cols=['a'], label_cols='y', num_iterations=7)"
    )


def test_a_model() -> None:
    frame = pd.DataFrame({"a": np.ones(3), "b": np.ones(3), "text": ["x", "y", "z"]})
    model = tr.Model(nn.Linear(2, 1), example=frame[["a", "b"]])
    assert repr(model) == "Model(Linear: features -> prediction)"
    assert repr(model.transformer()) == "TorchModel(Linear: features -> prediction)"
    assert repr(model.transformer(batch_size=16, prediction_col="p")) == (
        "TorchModel(Linear: features -> prediction, batch_size=16, prediction_col='p')"
    )
    text = tr.Model(nn.Linear(2, 1), example=frame[["text"]], decode={"text": tokens}, task="classification")
    assert repr(text) == "Model(Linear: text -> prediction, task='classification', decode={'text': tokens})"


def tokens(text: str) -> np.ndarray:
    return np.float32([len(text), 1])


def test_a_gang() -> None:
    assert repr(tr.Gang()) == "Gang()"
    assert repr(tr.Gang(ranks=(2, 4), on="driver", env={"TOKEN": "secret"})) == (
        "Gang(ranks=(2, 4), env=['TOKEN'], on='driver')"
    )


def test_values() -> None:
    assert shown({"a": (1,), "b": [np.mean, None]}) == "{'a': (1,), 'b': [mean, None]}"
    assert shown(pd.DataFrame({"x": [1]})) == "DataFrame"
    assert shown(list(range(100))).endswith("…]")
