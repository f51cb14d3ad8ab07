"""Strings, bytes, arrays of any length and nulls, as they come in real tables, in training and prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadData, BadRow, BadSetting, UntrustedModel
from tritium.ml import TorchModel, fit

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}
ROWS = 60
CITIES = ["Rome", "Oslo", "Rome", "Lima"]


class Mixed(nn.Module):
    """A model of numbers and words: `words` is the size of each embedding."""

    def __init__(self, **words: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({name: nn.Embedding(count, 2) for name, count in words.items()})
        self.last = nn.Linear(2 + 2 * len(words), 1)

    def forward(self, x: torch.Tensor, **words: torch.Tensor) -> torch.Tensor:
        parts = [self.embeddings[name](index).reshape(len(x), -1, 2).mean(1) for name, index in words.items()]
        return self.last(torch.cat([x, *parts], 1))


def frame(rows: int = ROWS) -> pd.DataFrame:
    random = np.random.default_rng(3)
    made = pd.DataFrame({"a": random.normal(size=rows), "b": random.normal(size=rows)})
    made["city"] = [CITIES[i % 4] for i in range(rows)]
    made["tags"] = [["x", "y", "z"][: i % 3] or ["x"] for i in range(rows)]
    made["image"] = [bytes([i % 256]) * 12 for i in range(rows)]
    made["y"] = made["a"] + (made["city"] == "Rome")
    return made


SETTINGS: dict[str, Any] = {
    **HERE,
    "model": lambda vocabulary: Mixed(city=len(vocabulary["city"])),
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.Adam(p, 0.05),
    "feature_cols": {"x": ["a", "b"], "city": "city"},
    "label_cols": ["y"],
    "vocabulary": ["city"],
    "epochs": 20,
}


def decode(content: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(content, np.uint8).reshape(3, 2, 2).astype(np.float32) / 255


class TestWords:
    def test_a_vocabulary_is_learnt_from_the_rows(self) -> None:
        model = fit(frame(), **SETTINGS)
        assert model.signature.inputs[1].codec["vocabulary"] == ("Rome", "Lima", "Oslo")  # by frequency, then alphabet
        assert model.history[-1]["loss"] < 0.1 * model.history[0]["loss"]
        whole = frame()
        found = model.predict(whole)
        assert np.abs(found - whole["y"]).mean() < 0.3
        np.testing.assert_allclose(model.predict(whole[::-1]), found[::-1], rtol=1e-5)

    def test_the_words_are_those_of_the_rows_to_train_on(self) -> None:
        rows = frame().assign(validate=lambda df: df["city"] == "Lima")
        with pytest.raises(BadRow, match=r"'Lima', which is not among the 2 values of its vocabulary"):
            fit(rows, **SETTINGS, validation="validate")

    def test_an_unknown_word_has_an_index_of_its_own(self) -> None:
        changes = {"model": lambda vocabulary: Mixed(city=len(vocabulary["city"]) + 1), "unknown_words": "keep"}
        model = fit(frame(), **SETTINGS | changes | {"vocabulary": {"city": 2}})
        assert model.signature.inputs[1].codec["vocabulary"] == ("Rome", "Lima")
        unknown = frame(4).assign(city=["Oslo", "Bonn", "Oslo", "Rome"], a=0.0, b=0.0)
        one, other, again, known = model.predict(unknown)
        assert one == other == again != known

    def test_an_unknown_word_is_an_error_with_its_row(self) -> None:
        model = fit(frame(), **SETTINGS | {"epochs": 1})
        rows = frame(4).assign(city=["Rome", "Bonn", "Oslo", "Rome"])
        with pytest.raises(BadRow, match=r"column 'city' is 'Bonn', which is not among the 3 values") as caught:
            model.predict(rows)
        assert caught.value.value == "Bonn"

    def test_words_that_are_given_hashed_and_null(self) -> None:
        rows = frame()
        rows.loc[::7, "city"] = None
        changes = {
            "model": lambda: Mixed(city=4, tag=8),
            "feature_cols": {"x": ["a", "b"], "city": "city", "tag": "city2"},
            "vocabulary": {"city": ["Lima", "Oslo", "Rome", "?"]},
            "hash_buckets": {"city2": 8},
            "nulls": {"city": "?", "city2": "none"},
        }
        model = fit(rows.assign(city2=rows["city"]), **SETTINGS | changes)
        again = rows.assign(city2=rows["city"])
        filled = again.fillna({"city": "?", "city2": "none"})
        np.testing.assert_array_equal(model.predict(again), model.predict(filled))

    def test_a_word_for_nulls_joins_the_words_that_are_learnt(self) -> None:
        rows = frame()
        rows.loc[::7, "city"] = None
        model = fit(rows, **SETTINGS | {"nulls": {"city": "?"}, "epochs": 1})
        assert model.signature.inputs[1].codec["vocabulary"] == ("Rome", "Lima", "Oslo", "?")

    def test_arrays_of_words(self) -> None:
        changes = {
            "feature_cols": {"x": ["a", "b"], "tags": "tags"},
            "vocabulary": ["tags"],
            "model": lambda vocabulary: Mixed(tags=len(vocabulary["tags"])),
            "pad": {"tags": 2},
        }
        model = fit(frame(), **SETTINGS | changes | {"epochs": 2})
        assert model.signature.inputs[1].codec["vocabulary"] == ("x", "y")
        assert model.predict(frame(5)).shape == (5,)

    def test_a_label_of_words_is_a_class(self) -> None:
        changes = {"label_cols": "city", "loss": nn.CrossEntropyLoss(), "model": lambda: nn.Linear(2, 3)}
        model = fit(frame(), **SETTINGS | changes | {"feature_cols": ["a", "b"]})
        assert model.signature.task == "classification"
        assert set(model.predict(frame())["prediction"]) <= {0.0, 1.0, 2.0}

    def test_a_string_without_settings_is_advised(self) -> None:
        with pytest.raises(
            BadData, match=r"'city' is a string\. .*vocabulary=\['city'\].*hash_buckets=\{'city': 1000\}"
        ):
            fit(frame(), **SETTINGS | {"vocabulary": None})

    @pytest.mark.parametrize(
        ("vocabulary", "message"),
        [
            ({"city": "all"}, "must be a list of words, a number of them"),
            ({"city": 0}, "a number of at least 1"),
            ({"city": 2}, 'give unknown_words="keep"'),
            (7, "must be a mapping from columns to their words"),
        ],
    )
    def test_a_wrong_vocabulary(self, vocabulary: Any, message: str) -> None:
        with pytest.raises(BadSetting, match=message):
            fit(frame(), **SETTINGS | {"vocabulary": vocabulary})

    def test_a_column_without_words(self) -> None:
        rows = frame().assign(city=pd.Series([None] * ROWS, dtype="string"))
        with pytest.raises(BadData, match="'city' has no words to learn"):
            fit(rows, **SETTINGS)


class TestImages:
    SETTINGS: ClassVar[dict[str, Any]] = {
        **HERE,
        "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 1)),
        "loss": nn.MSELoss(),
        "optimizer": lambda p: torch.optim.SGD(p, 0.05),
        "feature_cols": "image",
        "label_cols": ["y"],
        "decode": {"image": decode},
    }

    def test_decoded_in_training_and_prediction(self) -> None:
        model = fit(frame(), **self.SETTINGS)
        (image,) = model.signature.inputs
        assert (image.shape, image.dtype, image.types) == ((3, 2, 2), "float32", ("binary",))
        by_hand = np.stack([decode(content) for content in frame()["image"]])
        np.testing.assert_allclose(model.predict(frame()), model.predict(by_hand))

    def test_one_that_cannot_be_decoded(self) -> None:
        rows = frame()
        rows.loc[7, "image"] = b"short"
        with pytest.raises(BadRow, match=r"column 'image' .* row 7, 5 bytes b'short': decode raised ValueError"):
            fit(rows, **self.SETTINGS)
        model = fit(frame(), **self.SETTINGS)
        with pytest.raises(BadRow, match=r"column 'image' in row 7 of partition 0 .*5 bytes b'short': decode raised"):
            model.predict(rows)
        assert len(TorchModel(model, on_error="skip").transform(rows)) == ROWS - 1

    def test_one_of_another_size(self) -> None:
        model = fit(frame(), **self.SETTINGS | {"decode": {"image": flat}, "model": lambda: nn.Linear(12, 1)})
        rows = frame(4)
        rows.loc[2, "image"] = b"123456"
        with pytest.raises(BadRow, match=r"row 2 of partition 0 .*gave float32 of shape \(6,\), and .* \(12,\)"):
            model.predict(rows)
        with pytest.raises(BadRow, match=r"gave shape \(6,\), and the model takes \(12,\)"):
            model.predict(rows[2:3])

    @pytest.mark.usefixtures("saved_elsewhere")
    def test_saved_by_name_and_by_value(self, tmp_path: Path) -> None:
        model = fit(frame(), **self.SETTINGS)
        model.save(str(tmp_path / "named"))
        name = f"{decode.__module__}:decode"
        with pytest.raises(UntrustedModel, match=r"by the function|by value"):
            tr.load(str(tmp_path / "named"))
        found = model.predict(frame())
        np.testing.assert_array_equal(tr.load(str(tmp_path / "named"), trusted=True).predict(frame()), found)
        of_torch = fit(frame(), **self.SETTINGS | {"model": make_flat})
        of_torch.save(str(tmp_path / "both"))
        both = tr.load(str(tmp_path / "both"), trusted=[name, f"{make_flat.__module__}:make_flat"])
        np.testing.assert_array_equal(both.predict(frame()), of_torch.predict(frame()))
        by_value = fit(frame(), **self.SETTINGS | {"decode": {"image": lambda content: decode(content) * 1}})
        by_value.save(str(tmp_path / "value"))
        np.testing.assert_array_equal(tr.load(str(tmp_path / "value"), trusted=True).predict(frame()), found)

    def test_bytes_without_a_function_are_advised(self) -> None:
        with pytest.raises(BadData, match=r"'image' is binary\. .*decode=\{'image': function\}"):
            fit(frame(), **self.SETTINGS | {"decode": None})


def flat(content: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(content, np.uint8).astype(np.float32)


def make_flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 1))


class TestHandleInvalid:
    """In prediction: rows that the model can't take, on pandas DataFrames. On Spark: tests/spark/test_predict.py."""

    def rows(self) -> pd.DataFrame:
        rows = frame(12)
        rows.loc[2, "a"], rows.loc[5, "b"], rows.loc[6, "city"], rows.loc[9, "city"] = np.nan, np.inf, None, "Bonn"
        return rows

    def test_error_skip_and_keep(self) -> None:
        model = fit(frame(), **SETTINGS | {"epochs": 1})
        rows, bad = self.rows(), [2, 5, 6, 9]
        with pytest.raises(BadRow, match=r"on_error='skip', 'null' or 'column'"):
            TorchModel(model).transform(rows)
        good = model.predict(rows.drop(index=bad))
        skipped = TorchModel(model, on_error="skip").transform(rows)
        assert list(skipped.index) == [i for i in range(12) if i not in bad]
        np.testing.assert_array_equal(skipped["prediction"], good)
        kept = TorchModel(model, on_error="null").transform(rows)
        assert list(kept.index[kept["prediction"].isna()]) == bad
        np.testing.assert_array_equal(kept["prediction"].dropna(), good)

    def test_a_classification_and_no_good_row(self) -> None:
        changes = {"label_cols": "city", "loss": nn.CrossEntropyLoss(), "model": lambda: nn.Linear(2, 3)}
        model = TorchModel(fit(frame(), **SETTINGS | changes | {"feature_cols": ["a", "b"], "epochs": 1}))
        rows = self.rows()
        kept = model.setParams(on_error="null", prediction_col="p", probability_col="q").transform(rows)
        assert [i for i in range(12) if kept["q"][i] is None] == [2, 5] == list(kept.index[kept["p"].isna()])
        assert kept["q"][0].size == 3
        nothing = model.transform(rows[2:3])
        assert nothing["p"].isna().all()
        assert nothing["q"].tolist() == [None]
        assert len(model.setParams(on_error="skip").transform(rows[2:3])) == 0

    def test_many_bad_rows_of_every_kind(self) -> None:
        """Each is found, and no other: the good ones' predictions are those that they have alone."""
        model = fit(frame(), **SETTINGS | {"epochs": 1})
        random = np.random.default_rng(5)
        rows = frame(500)
        kinds = random.integers(0, 6, 500)
        rows.loc[kinds == 1, "a"] = np.nan
        rows.loc[kinds == 2, "b"] = -np.inf
        rows.loc[kinds == 3, "city"] = None
        rows.loc[kinds == 4, "city"] = "Bonn"
        rows.loc[kinds == 5, "a"] = 1e300  # beyond float32
        kept = TorchModel(model, on_error="null").transform(rows)["prediction"]
        assert (kept.isna() == (kinds > 0)).all()
        np.testing.assert_allclose(kept[kinds == 0], model.predict(rows[kinds == 0]), rtol=1e-6)

    def test_an_unknown_value(self) -> None:
        model = TorchModel(fit(frame(), **SETTINGS | {"epochs": 1}), on_error="drop")
        with pytest.raises(BadSetting, match="on_error='drop'"):
            model.transform(frame(3))
        with pytest.raises(BadSetting, match="on_error='drop' is unknown"):
            fit(frame(), **SETTINGS | {"on_error": "drop"})


@pytest.mark.processes
def test_the_same_with_two_ranks_as_with_one() -> None:
    two = fit(frame(), **SETTINGS | {"on": "driver", "ranks": 2, "global_batch_size": 20, "epochs": 3})
    one = fit(
        frame(), **SETTINGS | {"on": "driver", "ranks": 1, "global_batch_size": 20, "epochs": 3, "shuffle": "full"}
    )
    assert two.signature == one.signature


def test_arrow_tables() -> None:
    table = pa.Table.from_pandas(frame())
    model = fit(table, **SETTINGS | {"epochs": 1})
    np.testing.assert_array_equal(model.predict(table), model.predict(frame()))
