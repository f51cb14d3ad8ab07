"""What can't become a model, or be read, is refused before a training starts, or at its first step."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadData, BadRow, BadSetting
from tritium.ml import TorchSettings, fit
from tritium.ml.fitting import Plan, prepare, run
from tritium.ml.torch.backend import TorchBackend

X = ["a", "b", "c"]
GOOD: dict[str, Any] = {
    "model": lambda: nn.Linear(3, 1),
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.05),
    "feature_cols": X,
    "label_cols": ["y"],
    "verbose": False,
}
CLASSES: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "model": lambda: nn.Linear(3, 3)}
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none"}


def table(rows: int = 20) -> pa.Table:
    random = np.random.default_rng(1)
    columns: dict[str, Any] = {name: random.normal(size=rows) for name in [*X, "y"]}
    columns |= {"count": np.arange(rows), "cls": np.arange(rows) % 3, "index": (np.arange(rows) % 3).astype(float)}
    columns["day"] = pa.array(range(rows), pa.int32()).cast(pa.date32())
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(random.normal(size=rows * 4)), 4)
    return pa.table(columns)


def with_column(rows: pa.Table, name: str, values: Any) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index(name), name, values)


def planned(frame: Any = None, **changes: Any) -> Plan:
    return prepare(
        TorchBackend(), table() if frame is None else frame, TorchSettings(**GOOD | changes), tr.Gang(on="here")
    )


def refused(frame: Any = None, **changes: Any) -> str:
    with pytest.raises((BadData, BadSetting)) as caught:
        planned(frame, **changes)
    return str(caught.value)


def test_columns_that_the_model_would_add() -> None:
    """Probabilities are added by a classification alone."""
    there = table().append_column("Probability", pa.array([0.5] * 20))
    text = refused(there, **CLASSES, label_cols="cls")
    assert "has a column 'probability' already" in text
    assert "probability_col='another_probability'" in text
    planned(there, **CLASSES, label_cols="cls", probability_col="another_probability")
    planned(there)
    assert "a column 'y' already" in refused(prediction_col="y")


def test_vectors_of_spark_in_pandas_are_trained_on_and_scored() -> None:
    from pyspark.ml.linalg import Vectors

    rows = table().to_pandas()
    dense = [Vectors.dense(row) for row in rows[X].to_numpy()]
    vectors = rows.assign(v=[v if n % 2 else Vectors.sparse(3, range(3), v.toArray()) for n, v in enumerate(dense)])
    model, other = (
        fit(frame, TorchSettings(**GOOD | {"feature_cols": columns}), tr.Gang(**HERE))
        for frame, columns in ((vectors, "v"), (rows, X))
    )
    np.testing.assert_array_equal(model.predict(vectors), other.predict(rows))
    assert list(model.transform(vectors)["prediction"]) == list(other.predict(rows))


class Two(nn.Module):
    """A module that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(x), x


class OtherInEval(Two):
    """A module that returns a tensor in train mode, and a dict in eval mode."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.last(x)
        return scores if self.training else {"scores": scores, "top": scores.argmax(1)}


class Wide(Two):
    """A module of several scores for each class."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(x).reshape(-1, 3, 1)


class Keyed(Two):
    """A module of two inputs, the second of which are integers."""

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.last(x)[:, :1] + k[:, None]


def test_a_classification_whose_output_gives_no_classes_is_refused_before_the_start() -> None:
    classes: dict[str, Any] = {"label_cols": "cls", "task": "classification"}
    first = {"loss": lambda output, label: nn.functional.cross_entropy(output[0], label)}
    said = refused(model=Two, **classes | first)
    assert "returns 2 in eval mode: output_0 [batch, 3], output_1 [batch, 3]" in said
    assert "task=None" in said
    for task in ("classification", "auto"):
        said = refused(**CLASSES | classes | {"task": task, "model": OtherInEval})
        assert "returns 2 in eval mode: scores [batch, 3], top [batch]" in said
    narrow = {"loss": lambda output, label: nn.functional.cross_entropy(output[:, :, 0], label)}
    assert "'prediction' has [batch, 3, 1]" in refused(model=Wide, **classes | narrow)
    assert planned(**CLASSES | classes | {"task": None, "model": OtherInEval}).settings.task is None


def test_such_a_classification_is_refused_before_the_first_step_where_only_the_rows_show_a_length() -> None:
    rows = pa.table({"v": pa.array([[1.0, 2.0, 3.0]] * 8), "y": np.arange(8) % 3})
    asked: list[int] = []

    def step(module: Any, batch: Any) -> Any:
        asked.append(1)
        return module(batch["features"])[0].mean()

    settings: dict[str, Any] = {"feature_cols": "v", "label_cols": "y", "task": "classification", "batch_size": 2}
    plan = planned(rows.slice(0, 0), **settings, loss=None, train_step=step, model=Two)
    data = {"train": dataclasses.replace(plan.data["train"], frame=rows)}
    with pytest.raises(BadSetting, match="returns 2 in eval mode"):
        run(dataclasses.replace(plan, gang=tr.Gang(**HERE), data=data))
    assert asked == []


@pytest.mark.parametrize(
    ("name", "settings", "other", "says"),
    [
        ("cls", {**CLASSES, "label_cols": "cls"}, pa.float64(), "'cls' is double in the validation .*, and int64 in"),
        ("count", {"model": Keyed, "feature_cols": {"x": X, "k": "count"}}, pa.float32(), "'count' is float in the"),
        ("day", {"model": lambda: nn.Linear(4, 1), "feature_cols": [*X, "day"]}, pa.int32(), "'day' is int32 in the"),
        ("vector", {"model": lambda: nn.Linear(4, 1), "feature_cols": "vector"}, pa.float64(), "'vector' is double in"),
    ],
)
def test_validation_rows_of_other_types_are_refused(name: str, settings: Any, other: Any, says: str) -> None:
    changed = with_column(table(), name, pa.array(np.arange(20.0)).cast(other))
    assert re.search(says, refused(validation=changed, **settings))
    assert "validation" in planned(validation=table(5), **settings).data


def test_validation_rows_of_other_floats_and_integers_are_read_as_those_to_train_on() -> None:
    narrower = {pa.float64(): pa.float32(), pa.int64(): pa.int16()}
    narrow = table(10).cast(pa.schema([(f.name, narrower.get(f.type, f.type)) for f in table().schema]))
    keyed: dict[str, Any] = {"model": Keyed, "feature_cols": {"x": X, "k": "count"}}
    assert "validation_loss" in fit(table(), **GOOD | keyed, validation=narrow, **HERE).history[0]
    whole = with_column(table(10), "index", table(10)["index"].cast(pa.int64()))
    classes: dict[str, Any] = CLASSES | {"label_cols": "index", "task": "classification"}
    assert "validation_loss" in fit(table(), **GOOD | classes, validation=whole, **HERE).history[0]


def test_a_null_among_the_weights_is_not_filled_as_one_in_a_feature_called_weight() -> None:
    rows = table().rename_columns(["weight" if name == "c" else name for name in table().column_names])
    rows = rows.append_column("w", pa.array([None if i == 3 else 1.0 for i in range(20)]))
    settings: dict[str, Any] = GOOD | {"feature_cols": ["a", "b", "weight"], "weight_col": "w"}
    with pytest.raises(BadRow) as caught:
        fit(rows, **settings, **HERE, nulls={"weight": 70})
    assert (caught.value.column, caught.value.row_id) == ("w", 3)
    assert fit(rows, **settings, **HERE, nulls={"w": 0.5})
