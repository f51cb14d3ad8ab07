"""From a trained module to a transformer without a signature by hand: an example of what it is called with."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.errors import BadData, BadRow, BadSetting

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
    assert list(found.columns) == [*rows.columns, "p", "probability", "rawPrediction"]
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


# --- what training knew, and scoring needs

ALL_KINDS = pd.DataFrame(
    {
        "day": [dt.date(2020, 1, 1 + day) for day in range(4)],
        "time": pd.to_datetime(["2020-01-01", "2021-05-01", "2022-01-09", "2023-01-01"]),
        "big": [2**24 + 1, 2**24 + 3, 5, 7],
        "word": ["a", "b", "a", "zz"],
        "nan": [1.0, np.nan, np.inf, 2.0],
        "tokens": [[1, 2], [3], [], [4, 5, 6]],
        "null": pd.Series([1.0, None, 2.0, None], dtype="Float64"),
        "path": ["x", "yy", "zzz", "wwww"],
        "bytes": [b"\x00\x01", b"\x02\x03", b"\x04\x05", b"\x06\x07"],
        "index": [3, 2, 1, 0],
        "flag": [True, None, False, None],
    }
)
CASES: dict[str, dict[str, Any]] = {
    "a_date": {"columns": {"x": "day"}},
    "a_packed_date": {"columns": {"x": ["day", "index"]}},
    "a_time": {"columns": {"x": "time"}},
    "packed_times_rounded": {"columns": {"x": ["time", "index"]}, "dtype": {"x": "float32"}},
    "integers_rounded": {"columns": {"x": "big"}, "dtype": {"x": "float32"}},
    "packed_rounded_NaN": {"columns": {"x": ["big", "nan"]}, "dtype": {"x": "float32"}, "nan": "keep"},
    "words": {"columns": {"x": "word"}, "vocabulary": {"x": ["a", "b"]}, "unknown_words": "keep"},
    "hashed": {"columns": {"x": "word"}, "hash_buckets": {"word": 7}},
    "padded": {"columns": {"x": "tokens"}, "pad": {"tokens": (4, -1)}},
    "nulls": {"columns": {"x": ["null", "index"]}, "nulls": {"null": -3}},
    "masked_nulls": {"columns": {"x": "null"}, "nulls": {"null": "mask"}},
    "nulls_by_a_number_of_NumPy": {"columns": {"x": "null"}, "nulls": {"null": np.int64(2)}},
    "nulls_of_truth_values": {"columns": {"x": "flag"}, "nulls": {"flag": True}},
    "normalized": {
        "columns": {"x": ["big", "index"]},
        "dtype": {"x": "float64"},
        "normalize": {"big": (3.0, 2.0), "index": (1.0, 0.5)},
    },
    "bytes": {"columns": {"x": "bytes"}, "decode": {"bytes": lambda value: np.frombuffer(value, np.uint8)}},
    "paths": {"columns": {"x": "path"}, "decode": {"x": lambda path: np.float32([len(path)])}},
    "a_dataset": {"columns": {"x": "index"}, "decode": {"index": np.arange(8.0).reshape(4, 2)}},
}


class Seen(nn.Module):
    """A module that keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.clone())
        return x.reshape(len(x), -1).double().sum(1)


def of_batch(shard: Any) -> Any:
    ((batch,),) = (list(epoch) for epoch in shard.epochs(1, batch_size=4, shuffle=False))
    return batch


EXAMPLES: dict[str, Any] = {
    "a batch": of_batch,
    "some of its columns": lambda shard: {"x": of_batch(shard)["x"]},
    "an item of its loader": lambda shard: next(iter(shard.loader(batch_size=4, shuffle=False))),
    "rows that torch collates": lambda shard: next(
        iter(torch.utils.data.DataLoader(shard.dataset(shuffle=False), batch_size=4))
    ),
    "the shard": lambda shard: shard,
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_all_that_the_training_knew_comes_along(kind: str, tmp_path: Path) -> None:
    """The model is called with the same numbers as in the rank, whatever made them, and whatever batch it is from."""

    def train() -> Any:
        found = {}
        for name in CASES:
            shard = tr.world().shard(name)
            wanted = np.asarray(of_batch(shard)["x"])
            found[name] = (tr.Model(Seen(), example=EXAMPLES[kind](shard), inputs="x"), wanted)
            shard.close()  # else a mapping's "x" may be the column of any of them
        return found

    data = {name: tr.Data(ALL_KINDS, **settings) for name, settings in CASES.items()}
    (found,) = tr.launch(train, on="here", data=data, progress=False, output="none")
    for name, (model, wanted) in found.items():
        model.module.seen.clear()
        model.transform(ALL_KINDS)
        (seen,) = model.module.seen
        assert seen.numpy().dtype == wanted.dtype, name
        np.testing.assert_array_equal(seen.numpy(), wanted, name)
    model, wanted = found["bytes"]
    model.save(str(tmp_path / "m"))
    saved = tr.load(str(tmp_path / "m"), trusted=True)
    np.testing.assert_array_equal(saved.transform(ALL_KINDS)["prediction"], wanted.sum(axis=1))


def test_a_scalar_that_the_training_made_a_column() -> None:
    def train() -> Any:
        shard = tr.world().shard("train")
        batch = of_batch(shard)
        return tr.Model(nn.Linear(1, 1), example={"a": batch["a"][:, None]})

    (model,) = tr.launch(train, on="here", data={"train": ROWS}, progress=False, output="none")
    np.testing.assert_allclose(model.transform(ROWS)["prediction"], model.predict({"a": ROWS[["a"]].to_numpy("f4")}))


@pytest.mark.parametrize(
    ("example", "inputs", "settings", "message"),
    [
        (
            lambda shard: shard,
            "x_mask",
            {"nulls": {"null": "mask"}},
            r"'x_mask' marks the nulls of 'x'.*nulls={'x': 0}",
        ),
        (
            lambda shard: {"x_mask": of_batch(shard)["x_mask"]},
            None,
            {"nulls": {"null": "mask"}},
            "'x_mask' marks the nulls of 'x'",
        ),
        (
            lambda shard: {"x": of_batch(shard)["x"].reshape(4, 1, 1)},
            None,
            {"nulls": {"null": 0}},
            r"'x' is \[batch, 1, 1\], and column 'x' of the shard \[batch\].*transform=function",
        ),
        (lambda shard: shard, None, {"columns": {"x": "bytes"}}, r"holds values of type bytes.*decode={'x': function}"),
        (
            lambda shard: {"x": np.zeros((4, 2), np.float32)},
            None,
            {"columns": {"x": "bytes"}},
            r"from column 'bytes', of bytes that the training has decoded itself.*decode={'x': function}",
        ),
    ],
)
def test_what_cannot_come_along_is_refused_in_the_rank(
    example: Any, inputs: Any, settings: dict[str, Any], message: str
) -> None:
    def train() -> Any:
        return tr.Model(Seen(), example=example(tr.world().shard("train")), inputs=inputs)

    data = {"train": tr.Data(ALL_KINDS, **{"columns": {"x": "null"}, **settings})}
    with pytest.raises(BadSetting, match=message):
        tr.launch(train, on="here", data=data, progress=False, output="none")


def test_a_name_that_shards_read_differently() -> None:
    def train(example: Any) -> Any:
        world = tr.world()
        train, _ = world.shard("train"), world.shard("other")
        return tr.Model(Seen(), example=example(of_batch(train)))

    data = {"train": tr.Data(ROWS, columns={"x": ["a", "b"]}), "other": tr.Data(ROWS, columns={"x": ["b", "c"]})}
    run = {"on": "here", "data": data, "progress": False, "output": "none"}
    with pytest.raises(BadSetting, match=r"the shards 'other', 'train' have different columns 'x'.*example=shard"):
        tr.launch(train, args=(dict,), **run)
    (model,) = tr.launch(train, args=(lambda batch: batch,), **run)
    assert model.signature.columns == ("a", "b")


def test_transform_of_a_model_adds_the_predictions() -> None:
    model = tr.Model(nn.Linear(3, 1), example=ROWS, transform=lambda inputs: inputs)
    assert model.input_transform is not None
    pd.testing.assert_frame_equal(model.transform(ROWS), model.transformer().transform(ROWS))
    assert "p" in model.transform(ROWS, prediction_col="p")
    with pytest.raises(BadSetting, match=r"model\.input_transform = function"):
        model.transform = None  # type: ignore[method-assign, assignment]


# --- text


def tokens(text: str) -> Any:
    """Return the numbers of up to four letters, 0 after them."""
    numbers = [ord(letter) - 96 for letter in text[:4]]
    return np.array(numbers + [0] * (4 - len(numbers)))


TEXT = pd.DataFrame({"text": ["abc", "z", "dddd"], "label": [0, 1, 0], "n": [1.0, 2.0, 3.0]})


class OfTokens(nn.Module):
    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return text.sum(1).float()


@pytest.mark.parametrize(
    ("example", "inputs"),
    [
        (TEXT[["text"]], None),
        (TEXT, None),
        (pa.Table.from_pandas(TEXT), "text"),
        ({"text": ["abc", "z"]}, None),
        ({"text": np.array(["abc", "z"])}, None),
        ({"text": TEXT["text"], "label": [0, 1, 0]}, None),
        ({"text": np.stack([tokens("abc"), tokens("z")])}, None),
    ],
    ids=["one column", "a frame", "an Arrow table", "a list", "an array", "a Series", "tokens"],
)
def test_a_module_over_tokens_takes_text(example: Any, inputs: Any) -> None:
    model = tr.Model(OfTokens(), example=example, inputs=inputs, decode={"text": tokens})
    (taken,) = model.signature.inputs
    assert (taken.name, taken.columns, taken.dtype, taken.shape) == ("text", ("text",), "int64", (4,))
    expected = [6.0, 26.0, 16.0]
    assert list(model.transform(TEXT)["prediction"]) == expected
    assert list(model.predict(TEXT)) == expected
    assert list(model.predict({"text": ["abc", "z", "dddd"]})) == expected
    assert list(model.predict(["abc", "z", "dddd"])) == expected
    assert list(model.predict(np.stack([tokens(text) for text in TEXT["text"]]))) == expected


def test_arrays_that_are_decoded_already_are_taken_as_they_are() -> None:
    """Numbers are no texts to decode, also where there is one for each."""
    model = tr.Model(Seen(), example=TEXT[["text"]], inputs="text", decode={"text": lambda text: np.int64(len(text))})
    assert list(model.predict(["abc", "z", "dddd"])) == [3.0, 1.0, 4.0]
    assert list(model.predict(np.array([3, 1, 4]))) == [3.0, 1.0, 4.0]


def test_text_beside_numbers() -> None:
    class Both(nn.Module):
        def forward(self, features: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return features[:, 0] + text.sum(1)

    model = tr.Model(Both(), example=TEXT[["text", "n"]], decode={"text": tokens})
    assert [(i.name, i.columns) for i in model.signature.inputs] == [("features", ("n",)), ("text", ("text",))]
    assert list(model.transform(TEXT)["prediction"]) == [7.0, 28.0, 19.0]


def test_a_column_of_arrays_in_a_table() -> None:
    table = pa.table({"features": [[1.0, 2.0], [3.0, 4.0]], "y": [1, 0]})
    model = tr.Model(nn.Linear(2, 1), example=table.select(["features"]))
    assert [(i.name, i.dtype, i.shape) for i in model.signature.inputs] == [("features", "float32", (2,))]
    assert len(model.transform(table.to_pandas())) == 2
    with pytest.raises(BadSetting, match="'y' would be packed to an input 'features', as another column is called"):
        tr.Model(nn.Linear(2, 1), example=table)


@pytest.mark.parametrize(
    ("error", "example", "decode", "message"),
    [
        (
            BadSetting,
            TEXT,
            {"txt": tokens},
            r"decode names 'txt', which the example does not have\. Did you mean 'text'",
        ),
        (BadSetting, TEXT[["text"]], {}, r"'text' can't be packed.*decode={'text': function}"),
        (BadSetting, {"text": ["a"]}, {}, r"'text' holds values of type str.*decode={'text': function}"),
        (
            BadRow,
            {"text": ["a"]},
            {"text": lambda text: {"input_ids": [1]}},
            r"row 0, value 'a': decode gave a dict, and",
        ),
        (
            BadRow,
            {"text": ["a"]},
            {"text": lambda text: text.nothing},
            r"'text', row 0, value 'a': decode raised Attrib",
        ),
    ],
)
def test_text_that_cannot_be_decoded(error: Any, example: Any, decode: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        tr.Model(OfTokens(), example=example, decode=decode)


# --- words of classes


def test_the_words_of_a_label_come_along() -> None:
    rows = ROWS.assign(color=["red", "blue", "red"])

    def train() -> Any:
        shard = tr.world().shard("train")
        settings: dict[str, Any] = {"inputs": "x", "task": "classification"}
        models = [
            tr.Model(nn.Linear(2, 2), example=example, label_words="y", **settings)
            for example in (shard, of_batch(shard), next(iter(shard.loader(batch_size=2))))
        ]
        with pytest.raises(BadSetting, match=r"label_words='x' is no column.*Or give the words: label_words={'x'"):
            tr.Model(nn.Linear(2, 2), example=shard, label_words="x", **settings)
        return models

    data = tr.Data(rows, columns={"x": ["a", "b"], "y": "color"}, vocabulary={"y": ["blue", "red"]})
    (models,) = tr.launch(train, on="here", data={"train": data}, progress=False, output="none")
    for model in models:
        assert model.label_words == {"color": ["blue", "red"]}
        found = model.transform(rows)
        assert list(found["prediction_label"]) == [["blue", "red"][int(index)] for index in found["prediction"]]


def test_text_in_and_words_out() -> None:
    class Long(nn.Module):
        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return torch.stack([2.0 - text.count_nonzero(1), text.count_nonzero(1) - 2.0], 1)

    model = tr.Model(
        Long(),
        example={"text": ["a"]},
        decode={"text": tokens},
        task="classification",
        label_words={"length": ["short", "long"]},
    )
    assert list(model.transform(TEXT)["prediction_label"]) == ["long", "short", "long"]
