"""normalize=: features less their mean, divided by their deviation, the same in training and in every prediction."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.data import codec
from tritium.data.plan import plan
from tritium.data.schema import Data, Field
from tritium.errors import BadData, BadRow, BadSetting
from tritium.ml import LightGBMRegressor, TorchEstimator, first_batch
from tritium.ml.columns import find_columns
from tritium.ml.normalize import with_means
from tritium.ml.torch.settings import TorchSettings

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}


class Sum(nn.Module):
    """The sum of its inputs, and a weight that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, one: torch.Tensor | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        given = list(inputs.values()) if one is None else [one]
        parts = [value.reshape(len(value), -1).float().sum(1, keepdim=True) for value in given]
        return sum(parts) + 0 * self.weight  # type: ignore[return-value]


SUM: dict[str, Any] = {
    "model": Sum,
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.0),
    "label_cols": ["y"],
    **HERE,
}


def rows(count: int = 40) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"income": draw.uniform(2e4, 9e4, count), "age": draw.integers(18, 80, count)})
    frame["seen"] = 1.7e9 + draw.uniform(0, 1000, count)  # float32 holds such a number to 128
    frame["pixels"] = list(draw.uniform(0, 255, (count, 3)))
    frame["city"] = draw.integers(0, 4, count)
    frame["y"], frame["held"], frame["one"] = 0.0, np.arange(count) % 4 == 0, 7.0
    return frame


def standard(values: Any, over: Any) -> Any:
    over = np.stack(over).astype(float)
    return (np.stack(values) - over.mean(0)) / over.std(0)


def test_every_way_to_predict_normalises_as_the_training_did(tmp_path: Path) -> None:
    """Of the rows to train on alone; indices, constants and 17e8 with float32's 128 as its smallest step included."""
    frame = rows()
    cols = {"x": ["income", "age", "seen", "one"], "p": "pixels", "city": "city", "alone": "income"}
    model = TorchEstimator(**SUM, feature_cols=cols, normalize=True, validation="held").fit(frame)
    used = frame[~frame.held]
    expected = sum(standard(frame[name], used[name]) for name in ("income", "income", "age", "seen"))
    expected = expected + standard(frame.pixels, used.pixels).sum(1) + frame.city
    np.testing.assert_allclose(model.predict(frame), expected, atol=2e-5)
    np.testing.assert_allclose(model.transform(frame).prediction, expected, atol=2e-5)
    arrays = {"x": frame[cols["x"]].to_numpy(), "p": np.stack(frame.pixels), "city": frame.city, "alone": frame.income}
    np.testing.assert_allclose(model.predict(arrays), expected, atol=2e-5)
    model.model.save(str(tmp_path / "model"))
    again = tr.load(str(tmp_path / "model"), trusted=True)
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    assert again.predict(frame.head(0)).shape == (0,)
    np.testing.assert_allclose(again.predict(pa.Table.from_pandas(frame)), expected, atol=2e-5)
    history = model.history[-1]
    assert history["loss"] == pytest.approx((expected[~frame.held] ** 2).mean(), rel=1e-5)
    assert history["validation_loss"] == pytest.approx((expected[frame.held] ** 2).mean(), rel=1e-5)


def test_some_columns_given_numbers_and_nulls() -> None:
    frame = rows().astype({"age": float})
    frame.loc[::5, "age"] = None
    table = pa.Table.from_pandas(frame, preserve_index=False)
    cols = ["income", "age"]
    filled = frame.age.fillna(40)
    some = TorchEstimator(**SUM, feature_cols={"a": cols}, normalize=["age"], nulls={"age": 40}).fit(table)
    np.testing.assert_allclose(some.predict(table), frame.income + standard(filled, filled), rtol=1e-6)
    given = {"normalize": {"age": (30, 10)}, "nulls": {"age": 40}}
    found = TorchEstimator(**SUM, feature_cols={"a": cols}, **given).fit(table).predict(table)
    np.testing.assert_allclose(found, frame.income + (filled - 30) / 10, rtol=1e-6)
    age = pa.array([1.0, 2.0, 3.0, np.nan, np.inf])
    kept: dict[str, Any] = {"feature_cols": {"a": ["age"]}, "normalize": True, "nan": "keep"}
    settings = TorchSettings(**{k: v for k, v in SUM.items() if k not in HERE}, **kept)
    infinite = pa.table({"age": age, "y": np.zeros(5)})
    learnt = with_means(infinite, settings, find_columns(infinite, settings)).values["normalize"]
    assert learnt == {"a": (pytest.approx([2], abs=1e-6), pytest.approx([(2 / 3) ** 0.5], rel=1e-6))}
    model = TorchEstimator(**SUM, **kept).fit(infinite.slice(0, 3))
    np.testing.assert_allclose(model.predict(infinite), [-1.2247449, 0, 1.2247449, np.nan, np.inf], atol=1e-6)


def test_one_column_as_a_number_and_as_an_index() -> None:
    frame = rows()
    both = {"x": ["income", "city"], "city": "city"}
    for asked in (True, ["income", "city"]):
        model = TorchEstimator(**SUM, feature_cols=both, normalize=asked).fit(frame)
        expected = standard(frame.income, frame.income) + standard(frame.city, frame.city) + frame.city
        np.testing.assert_allclose(model.predict(frame), expected, atol=1e-5)
    confused = {"income": ["age"], "y2": "income"}
    with pytest.raises(BadData, match=r"input 'income' has the name of a column that is another input"):
        TorchEstimator(**SUM, feature_cols=confused, normalize=True).fit(frame)


def test_rows_that_are_left_out_do_not_count() -> None:
    frame = rows().astype({"age": float})
    frame.loc[::5, "age"] = None
    frame.loc[1, "income"] = np.nan
    table = pa.Table.from_pandas(frame, preserve_index=False)
    model = TorchEstimator(**SUM, feature_cols=["income", "age"], normalize=True, on_error="skip").fit(table)
    used = frame.dropna()
    expected = standard(used.income, used.income) + standard(used.age, used.age)
    np.testing.assert_allclose(model.transform(used).prediction, expected, atol=1e-5)


def test_arrays_of_another_length_and_nulls_are_told_as_without_normalising() -> None:
    """Also where the rows of a later batch of the table are concerned, and where all of them are."""
    good = [[1.0, 2.0], [3.0, 6.0]] * 4096
    table = pa.table({"x": pa.array([*good, None, [1.0, 2.0, 3.0]]), "y": np.zeros(8194)})
    settings: dict[str, Any] = SUM | {"feature_cols": "x", "normalize": True}
    with pytest.raises(BadRow, match=r"column 'x' .* is null in row 8192\. .*leaves out such rows"):
        TorchEstimator(**settings).fit(table)
    model = TorchEstimator(**settings, on_error="skip").fit(table)
    assert model.history[-1]["rows_skipped"] == 2
    np.testing.assert_allclose(model.predict(pa.table({"x": [[3.0, 6.0]]})), 2.0, atol=1e-5)


def test_what_can_not_be_normalised_is_refused() -> None:
    frame = rows().assign(word="x")
    settings: dict[str, Any] = {**SUM, "feature_cols": {"a": ["income"], "city": "city", "w": "word"}}
    settings["vocabulary"] = ["word"]
    for wrong, message in {
        "incme": r"'incme' is no feature\. Did you mean 'income'",
        "city": r"'city' is int64, an index or the like.*feature_cols=\{'city': \['city'\]\}",
        "word": r"'word' is an index or the like",
    }.items():
        with pytest.raises(BadData, match=message):
            TorchEstimator(**settings, normalize=[wrong]).fit(frame)
    with pytest.raises(BadData, match="no feature is a floating number"):
        TorchEstimator(**SUM, feature_cols={"city": "city"}, normalize=True).fit(frame)
    with pytest.raises(BadSetting, match=r"normalize=5 must be True, a list of columns"):
        TorchEstimator(**settings, normalize=5)
    with pytest.raises(BadSetting, match=r"trees .* need no normalize="):
        LightGBMRegressor(feature_cols=["income"], label_cols="y", normalize=True)
    for pair in ((0, 0), (0, -1), (np.nan, 1), ([1, 2], [1, 2])):
        with pytest.raises(BadData, match=r"normalize for 'income': it must be \(mean, standard deviation\)"):
            TorchEstimator(**settings, normalize={"income": pair}).fit(frame)
    given: Any
    for given in (5, (1,), (1, 2, 3), ([], [])):
        with pytest.raises(BadData, match=r"normalize for 'pixels': it must be \(mean, standard deviation\)"):
            plan(pa.schema({"pixels": pa.list_(pa.float64())}), Data(frame, normalize={"pixels": given}), "train")
    tiny = {"income": (0.0, 1e-40)}
    with pytest.raises(BadRow, match=r"'income'.* is normalised to a number beyond float32 in row 0"):
        TorchEstimator(**settings, normalize=tiny).fit(frame)


def test_a_batch_of_data_is_normalised_and_a_masked_value_is_0() -> None:
    table = pa.table({"a": pa.array([1.0, None, 5.0]), "v": pa.array([[0.0, 1.0], [2.0, 3.0], [4.0, 9.0]])})
    given = {"a": (1.0, 2.0), "v": ([2.0, 1.0], [1.0, 4.0])}
    data = Data(table, columns={"a": "a", "v": "v"}, default_dtype="float32", nulls={"a": "mask"}, normalize=given)
    fields = {field.name: field for field in plan(table.schema, data, "train")}
    again = {name: Field.from_json(field.to_json()) for name, field in fields.items()}
    ids = np.arange(3)
    a, present = codec.read(again["a"], table["a"].combine_chunks(), ids)
    np.testing.assert_array_equal(a, np.float32([0, 0, 2]))
    assert present is not None
    assert present.tolist() == [True, False, True]
    v, _ = codec.read(again["v"], table["v"].combine_chunks(), ids)
    np.testing.assert_array_equal(v, np.float32([[-2, 0], [0, 0.5], [2, 2]]))
    assert (a.dtype, v.dtype) == (np.float32, np.float32)


def test_the_order_of_the_rows_changes_no_bit() -> None:
    """Spark may add them in any order, and the fingerprint of a run must be the same."""
    draw = np.random.default_rng(1)
    values = draw.normal(1e6, 3, 5000)
    settings = TorchSettings(**{k: v for k, v in SUM.items() if k not in HERE}, feature_cols=["x"], normalize=True)
    learnt = []
    for _ in range(3):
        draw.shuffle(values)
        table = pa.table({"x": values, "y": values})
        learnt.append(with_means(table, settings, find_columns(table, settings)).values["normalize"])
    assert learnt[0] == learnt[1] == learnt[2]
    ((mean,), (std,)) = learnt[0]["features"]
    assert abs(mean - values.mean()) < 1e-5
    assert abs(std - values.std()) < 1e-6


def test_a_hint_is_given_for_other_scales_alone() -> None:
    settings = TorchSettings(**{k: v for k, v in SUM.items() if k not in HERE}, feature_cols=["a", "b"])
    batch = {"features": torch.tensor([[0.5, -900.0], [0.1, 3.0]]), "label": torch.zeros(2, 1)}
    found = list(first_batch.notes(settings, batch, [nn.Linear(2, 1)]))
    assert found[0].startswith("features of different scales: up to 0.5 in 'a', and up to 900 in 'b'")
    for others in (
        {"layers": [nn.BatchNorm1d(2)]},
        {"settings": dataclasses.replace(settings, normalize=["a"])},
        {"settings": dataclasses.replace(settings, transform=lambda inputs: inputs)},
        {"settings": dataclasses.replace(settings, verbose=False)},
        {"batch": {**batch, "features": torch.tensor([[1.0, -900.0], [0.0, np.inf]])}},
        {"batch": {**batch, "features": torch.zeros(2, 2)}},
        {"batch": {**batch, "features": torch.tensor([1, 90000])}},
        {"batch": {**batch, "features": torch.rand(2, 3, 4, 4) * 1e6}},
    ):
        given: dict[str, Any] = {"settings": settings, "batch": batch, "layers": [nn.Linear(2, 1)], **others}
        assert not list(first_batch.notes(**given))


def test_a_row_that_cant_be_read_is_named_as_without_it() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0, float("nan"), 5.0], "y": [1.0, 2.0, 3.0, 4.0, 5.0]})
    settings: dict[str, Any] = {"model": lambda: nn.Linear(1, 1), "loss": nn.MSELoss(), "optimizer": torch.optim.SGD}
    settings |= {"feature_cols": ["x"], "label_cols": ["y"], **HERE}
    said = []
    for normalize in (None, True):
        with pytest.raises(BadRow) as refused:
            TorchEstimator(**settings, normalize=normalize).fit(frame)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "row 3" in said[0]
