"""From a trained module to a transformer without a signature by hand: an example of what it is called with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadData, BadSetting

ROWS = pd.DataFrame({"a": [0.5, 1.5, 2.5], "b": [1.0, 2.0, 3.0], "c": [3, 2, 1]})


class Named(nn.Module):
    """A module of a vector and the index of a word, which returns a score for each of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(3, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([x, self.words(word)], 1))


def test_a_table_is_packed() -> None:
    module = nn.Linear(3, 1)
    nn.init.constant_(module.weight, 0.5)  # sums that float32 holds exactly, in whatever order they are made
    nn.init.constant_(module.bias, -1.0)
    model = tr.Model(module, example=ROWS)
    (taken,), (output,) = model.signature.inputs, model.signature.outputs
    assert (taken.name, taken.columns, taken.dtype, taken.shape) == ("features", ("a", "b", "c"), "float32", (3,))
    assert output.shape == (1,)
    np.testing.assert_array_equal(model.predict(ROWS), ROWS.sum(axis=1) / 2 - 1)
    assert tr.Model(module, example=pa.Table.from_pandas(ROWS)).signature == model.signature


def test_a_batch_of_a_shard_brings_its_decoding(tmp_path: Path) -> None:
    """The transformer decodes as the training did: words by their index, packed columns, a word for null."""
    rows = ROWS.assign(word=["red", "blue", "red"], y=1.0)

    def train() -> Any:
        shard = tr.world().shard("train")
        (batch,) = (batch for epoch in shard.epochs(1, batch_size=3) for batch in epoch)
        return tr.Model(Named(), example=batch, task="classification")

    data = tr.Data(
        rows,
        columns={"x": ["a", "b"], "word": "word", "y": "y"},
        vocabulary={"word": ["red", "blue", "?"]},
        nulls={"word": "?"},
    )
    (model,) = tr.launch(train, on="here", data={"train": data}, progress=False, output="none")
    assert [(i.name, i.columns, i.dtype) for i in model.signature.inputs] == [
        ("x", ("a", "b"), "float32"),
        ("word", ("word",), "int64"),
    ]
    again = rows.assign(word=["blue", None, "red"])
    found = model.transformer(prediction_col="p").transform(again)
    assert list(found.columns) == [*rows.columns, "p", "probability"]
    index = torch.tensor([1, 2, 0])
    with torch.no_grad():
        scores = model.module(torch.tensor(rows[["a", "b"]].to_numpy(np.float32)), index)
    np.testing.assert_array_equal(found["p"], scores.argmax(1))
    model.save(str(tmp_path / "m"))
    saved = tr.load(str(tmp_path / "m"), trusted=True).transformer()
    np.testing.assert_array_equal(saved.transform(again)["prediction"], found["p"])


def test_arrays_by_name_and_the_names_of_inputs() -> None:
    batch = {"x": np.zeros((2, 2), np.float32), "word": np.zeros(2, np.int64), "y": np.zeros(2)}
    assert [i.name for i in tr.Model(Named(), example=batch).signature.inputs] == ["x", "word"]
    one = tr.Model(nn.Linear(2, 1), example=batch, inputs="x")
    assert [(i.name, i.shape) for i in one.signature.inputs] == [("x", (2,))]
    tensors = {"x": torch.zeros(2, 2)}
    assert tr.Model(nn.Linear(2, 1), example=tensors).signature.inputs == one.signature.inputs


@pytest.mark.parametrize(
    ("example", "inputs", "message"),
    [
        (None, None, r"needs a signature.*tr\.Model\(module, example=batch\)"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(2)}, None, r"has the columns 'x', 'y', .* arguments are input.*\['x'\]"),
        ({"x": np.zeros((2, 2))}, ["z"], r"the example has no 'z'"),
        (np.zeros((2, 2)), None, "example is a ndarray, and must be"),
        (pd.DataFrame({"a": ["text"]}), None, "'a' can't be packed"),
    ],
)
def test_what_cannot_be_told(example: Any, inputs: Any, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        tr.Model(nn.Linear(2, 1), example=example, inputs=inputs)


def test_a_module_that_does_not_take_the_example() -> None:
    with pytest.raises(BadData, match=r"(?s)be called with the example: RuntimeError.*x \[2, 5\] float32"):
        tr.Model(nn.Linear(2, 1), example={"x": np.zeros((2, 5), np.float32)})
