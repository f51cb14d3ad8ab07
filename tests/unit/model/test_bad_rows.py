"""Rows without a prediction: `on_error`, on pandas and arrays. On Spark: tests/spark/test_on_error.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadRow, BadSetting
from tritium.ml import TorchModel
from tritium.model.signature import Input, Output, Signature

SIGNATURE = Signature((Input("x", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),))
CLASSES = Signature(SIGNATURE.inputs, (Output("y", shape=(2,)),), "classification", label_words={"w": ("no", "yes")})


class Picky(nn.Module):
    """A model that raises for a row whose first number is negative."""

    def __init__(self, raised: Callable[[float], Exception] = lambda value: ValueError(f"no {value:g}")) -> None:
        super().__init__()
        self.raised = raised
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        for value in x[:, 0]:
            if value < 0:
                raise self.raised(float(value))
        return x.sum(1, keepdim=True)


def rows(count: int = 20, bad: Mapping[int, float] | None = None) -> pd.DataFrame:
    frame = pd.DataFrame({"a": np.arange(count, dtype=float), "b": 0.5})
    for row, value in ({3: np.nan, 7: -2.0, 12: -3.0} if bad is None else bad).items():
        frame.loc[row, "a"] = value
    return frame


def test_each_bad_row_has_its_reason_and_all_others_their_numbers() -> None:
    scored = TorchModel(tr.Model(Picky(), SIGNATURE), on_error="column", batch_size=8).transform(rows())
    good = [row for row in range(20) if row not in (3, 7, 12)]
    np.testing.assert_array_equal(scored.prediction[good], np.array(good) + 0.5)
    assert scored.prediction_error[good].isna().all()
    assert scored.prediction[[3, 7, 12]].isna().all()
    assert scored.prediction_error[[3, 7, 12]].tolist() == [
        "column 'a' is NaN",
        "ValueError: no -2",
        "ValueError: no -3",
    ]


def test_predict_of_a_table_and_of_arrays() -> None:
    model = tr.Model(Picky(), SIGNATURE)
    frame = rows()
    for data in (frame, frame.to_numpy(np.float32), torch.tensor(frame.to_numpy(np.float32))):
        scored = model.predict(data, on_error="column")
        assert isinstance(scored, dict)
        bad = [row for row, reason in enumerate(scored["prediction_error"]) if reason is not None]
        assert bad == [3, 7, 12] == np.flatnonzero(np.isnan(scored["prediction"])).tolist()
        nulls = model.predict(data, on_error="null")
        np.testing.assert_array_equal(nulls, scored["prediction"])
        assert len(model.predict(data, on_error="skip")) == 17
        with pytest.raises(BadRow):
            model.predict(data)


def test_classes_and_words() -> None:
    class Scores(Picky):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.tensor([[0.0, 1.0]])

    model = tr.Model(Scores(), CLASSES)
    scored = model.predict(rows(5, {1: -1}), on_error="column")
    assert isinstance(scored, dict)
    assert scored["prediction_label"].tolist() == ["yes", None, "yes", "yes", "yes"]
    assert np.isnan(scored["probability"][1]).all()
    assert scored["prediction_error"].tolist() == [None, "ValueError: no -1", None, None, None]
    frame = model.transformer(on_error="column", error_col="why").transform(rows(5, {1: -1}))
    assert frame["prediction_label"].tolist() == ["yes", None, "yes", "yes", "yes"]
    assert frame["why"].tolist() == [None, "ValueError: no -1", None, None, None]
    assert frame["probability"][1] is None


def test_a_batch_is_halved_until_its_bad_row_is_alone() -> None:
    module = Picky()
    tr.Model(module, SIGNATURE).predict(rows(64, {9: -1}), batch_size=64, on_error="null")
    assert module.rows == [64, 32, 16, 8, 8, 4, 2, 1, 1, 2, 4, 16, 32]


def test_many_bad_rows_are_those_that_are_bad() -> None:
    random = np.random.default_rng(7)
    values = random.normal(size=500)
    frame = pd.DataFrame({"a": values, "b": 0.0})
    scored = TorchModel(tr.Model(Picky(), SIGNATURE), on_error="column", batch_size=100).transform(frame)
    assert (scored.prediction.isna() == (values < 0)).all()
    assert (scored.prediction_error.notna() == (values < 0)).all()


def test_an_integer_output_becomes_a_float_where_a_row_is_missing() -> None:
    class Whole(Picky):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).long().repeat(1, 2)

    model = tr.Model(Whole(), Signature(SIGNATURE.inputs, (Output("y", "int64", (2,)),)))
    found = model.predict(rows(3, {1: -1}), on_error="null")
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, [[0, 0], [np.nan, np.nan], [2, 2]])


FATAL = {
    "missing code": (ImportError("No module named 'ours'"), "No module named"),
    "a dead device": (RuntimeError("CUDA error: device-side assert triggered"), "device-side assert"),
    "a setting": (BadSetting("transform returned nothing"), "returned nothing"),
    "memory": (MemoryError("one row is too large"), "one row"),
}


@pytest.mark.parametrize("case", FATAL)
def test_what_is_no_rows_fault_still_fails(case: str) -> None:
    error, text = FATAL[case]

    def raised(value: float) -> Exception:
        return error

    with pytest.raises(type(error), match=text):
        tr.Model(Picky(raised), SIGNATURE).predict(rows(), on_error="column")


def test_a_model_that_fails_for_all_first_rows_alike_is_broken_and_not_its_rows() -> None:
    frame = pd.DataFrame({"a": [-1.0] * 10, "b": 0.0})
    with pytest.raises(ValueError, match="no -1"):
        tr.Model(Picky(), SIGNATURE).predict(frame, on_error="column")
    later = pd.concat([rows(4, {}), frame], ignore_index=True)
    found = tr.Model(Picky(), SIGNATURE).predict(later, on_error="null", batch_size=4)
    assert isinstance(found, np.ndarray)
    assert np.isnan(found[4:]).all()
    one = tr.Model(Picky(), SIGNATURE).predict(frame[:1], on_error="column")
    assert isinstance(one, dict)
    assert one["prediction_error"].tolist() == ["ValueError: no -1"], "one row alone can't tell"


def test_a_batch_that_needs_too_much_memory_is_halved() -> None:
    class Small(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return x.sum(1, keepdim=True)

    found = tr.Model(Small(), SIGNATURE).predict(rows(10, {}), on_error="column")
    assert isinstance(found, dict)
    np.testing.assert_array_equal(found["prediction"], np.arange(10) + 0.5)
    assert found["prediction_error"].tolist() == [None] * 10


def test_the_column_must_be_free_and_the_value_known() -> None:
    model = TorchModel(tr.Model(Picky(), SIGNATURE), on_error="column")
    with pytest.raises(BadSetting, match="'prediction_error' already"):
        model.transform(rows().assign(prediction_error=1))
    assert "prediction_error" in model.setParams(on_error="null").transform(rows().assign(prediction_error=1))
    with pytest.raises(BadSetting, match="on_error='keep': a row"):
        tr.Model(Picky(), SIGNATURE).predict(rows(), on_error="keep")  # type: ignore[arg-type]


def test_a_value_that_can_not_be_decoded() -> None:
    def decode(content: bytes) -> Any:
        return np.frombuffer(content, np.float32).reshape(2)

    model = tr.Model(Picky(), example={"x": [np.ones(2, np.float32).tobytes()]}, decode={"x": decode})
    good = np.ones(2, np.float32).tobytes()
    for data in (pd.DataFrame({"x": [good, b"abc", good]}), {"x": [good, b"abc", good]}):
        found = model.predict(data, on_error="column")
        assert isinstance(found, dict)
        assert [reason is None for reason in found["prediction_error"]] == [True, False, True]
        assert "put 'x', 3 bytes b'abc': " in found["prediction_error"][1].replace("column", "input")


def test_an_integer_that_float32_does_not_hold_is_of_its_own_column() -> None:
    frame = pd.DataFrame({"a": [1, 2**24 + 1, 3], "b": [2.0**25 + 2, 1.0, 2.0**26]})
    predicted = tr.Model(Picky(), signature=SIGNATURE).predict(frame, on_error="null")
    assert np.isnan(np.ravel(predicted)).tolist() == [False, True, False]
