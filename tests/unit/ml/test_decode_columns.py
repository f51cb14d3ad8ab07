"""`decode=` for columns of strings and of integers: files by their path, and map-style datasets by their index."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import tritium as tr
from tritium.errors import BadData, BadRow, BadSetting, SignatureMismatch
from tritium.ml import TorchModel, fit

HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none", "verbose": False}
ROWS = 40


class Images(Dataset[torch.Tensor]):
    """A dataset of tensors, of which each tells its index."""

    def __init__(self, count: int = ROWS) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 2, 2), index / ROWS)


def load(path: str) -> np.ndarray[Any, Any]:
    assert isinstance(path, str)
    return np.fromfile(path, np.float32).reshape(3, 2, 2)


def of_number(number: int) -> np.ndarray[Any, Any]:
    assert type(number) is int
    return np.full((3, 2, 2), number / ROWS, np.float32)


@pytest.fixture
def frame(tmp_path: Path) -> pd.DataFrame:
    """Return paths and indices in another order than the rows', and the label of each."""
    order = np.random.default_rng(4).permutation(ROWS)
    for index in order:
        np.full(12, index / ROWS, np.float32).tofile(tmp_path / f"ü{index}")
    paths = [str(tmp_path / f"ü{index}") for index in order]
    return pd.DataFrame({"path": paths, "index": order, "x": np.arange(ROWS, dtype=float), "y": order / ROWS})


SETTINGS: dict[str, Any] = {
    **HERE,
    "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 1)),
    "loss": nn.MSELoss(),
    "optimizer": lambda p: torch.optim.SGD(p, 0.05),
    "label_cols": ["y"],
    "batch_size": 8,
}
WAYS: dict[str, dict[str, Any]] = {
    "path": {"feature_cols": "path", "decode": {"path": load}},
    "dataset": {"feature_cols": "index", "decode": {"index": Images()}},
    "array": {"feature_cols": "index", "decode": {"index": np.stack([of_number(i) for i in range(ROWS)])}},
    "function": {"feature_cols": "index", "decode": {"index": of_number}},
    "threads": {"feature_cols": "index", "decode": {"index": Images()}, "decode_threads": 3},
    "listed": {"feature_cols": ["index"], "decode": {"index": Images()}},
}


@pytest.mark.parametrize("way", list(WAYS))
def test_trained_and_predicted_as_from_bytes(way: str, frame: pd.DataFrame, tmp_path: Path) -> None:
    rows = frame.assign(image=[of_number(int(i)).tobytes() for i in frame["index"]])
    decode = {"image": lambda content: np.frombuffer(content, np.float32).reshape(3, 2, 2)}
    expected = fit(rows, **SETTINGS, feature_cols="image", decode=decode)
    for table in (frame, pa.Table.from_pandas(frame)):
        model = fit(table, **SETTINGS, **WAYS[way])
        (taken,) = model.signature.inputs
        assert (taken.shape, taken.dtype) == ((3, 2, 2), "float32")
        found = model.predict(table)
        np.testing.assert_array_equal(found, expected.predict(rows))
    np.testing.assert_array_equal(TorchModel(model).transform(frame)["prediction"], found)
    model.save(str(tmp_path / "model"))
    np.testing.assert_array_equal(tr.load(str(tmp_path / "model"), trusted=True).predict(frame), found)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "Int64", "category"])
def test_integers_and_words_of_every_type(dtype: str, frame: pd.DataFrame) -> None:
    expected = fit(frame, **SETTINGS, **WAYS["dataset"]).predict(frame)
    if dtype == "category":
        rows = frame.assign(path=frame["path"].astype("category"))
        model = fit(rows, **SETTINGS, **WAYS["path"])
    else:
        rows = frame.assign(index=frame["index"].astype(dtype))
        model = fit(rows, **SETTINGS, **WAYS["dataset"])
    np.testing.assert_array_equal(model.predict(rows), expected)


def test_the_rows_of_a_batch_are_decoded_in_threads(frame: pd.DataFrame) -> None:
    barrier = threading.Barrier(2, timeout=60)

    def decode(number: int) -> Any:
        barrier.wait()  # two rows are decoded at once
        return of_number(number)

    def rows() -> int:
        return sum(
            len(batch["index"]) for epoch in tr.world().shard("train").epochs(1, batch_size=8) for batch in epoch
        )

    data = tr.Data(frame, columns=["index"], decode={"index": decode}, decode_threads=2)
    assert tr.launch(rows, on="here", data={"train": data}, progress=False) == [ROWS]


class TestWhatCanNotBeDecoded:
    BROKEN: ClassVar[dict[str, tuple[str, Any, str]]] = {
        "beyond": ("index", 40, "value 40: decode raised IndexError: index 40, and the dataset has 40 rows"),
        "negative": ("index", -1, "value -1: decode raised IndexError: index -1, and the dataset has 40 rows"),
        "missing": ("path", "no/such", r"value 'no/such': decode raised FileNotFoundError: .*"),
    }

    @pytest.mark.parametrize("case", list(BROKEN))
    def test_is_named_with_row_column_and_reason(self, case: str, frame: pd.DataFrame) -> None:
        column, value, message = self.BROKEN[case]
        way = WAYS["path" if column == "path" else "dataset"]
        rows = frame.copy()
        rows.loc[7, column] = value
        with pytest.raises(BadRow, match=rf"column '{column}' of 'train', row 7, {message}") as caught:
            fit(rows, **SETTINGS, **way)
        assert (caught.value.column, caught.value.row_id, caught.value.value) == (column, 7, value)
        model = fit(frame, **SETTINGS, **way)
        with pytest.raises(BadRow, match=rf"column '{column}' in row 7 of partition 0 .*{message}"):
            model.predict(rows)
        assert len(TorchModel(model, on_error="skip").transform(rows)) == ROWS - 1
        kept = TorchModel(model, on_error="null").transform(rows)["prediction"]
        assert list(np.flatnonzero(kept.isna())) == [7]

    def test_one_of_another_shape(self, frame: pd.DataFrame) -> None:
        def decode(number: int) -> Any:
            return np.zeros(3 if number == frame["index"][5] else 12, np.float32)

        with pytest.raises(BadRow, match=r"row 5, value \d+: decode gave float32 of shape \(3,\), and float32"):
            fit(frame, **SETTINGS, feature_cols="index", decode={"index": decode}, shuffle=False)
        model = fit(frame.drop(index=5), **SETTINGS, feature_cols="index", decode={"index": decode})
        with pytest.raises(BadRow, match=r"column 'index' in row 5 of partition 0 .*shape \(3,\)"):
            model.predict(frame)
        assert len(TorchModel(model, on_error="skip").transform(frame)) == ROWS - 1
        kept = TorchModel(model, on_error="null").transform(frame)["prediction"]
        assert list(np.flatnonzero(kept.isna())) == [5]

    def test_a_dataset_of_pairs(self, frame: pd.DataFrame) -> None:
        pairs = TensorDataset(torch.zeros(ROWS, 12), torch.zeros(ROWS))
        with pytest.raises(BadRow, match=r"has a tuple of 2 at index .* give a function of the index"):
            fit(frame, **SETTINGS, feature_cols="index", decode={"index": pairs})
        model = fit(frame, **SETTINGS, feature_cols="index", decode={"index": lambda index: pairs[index][0]})
        assert model.predict(frame).shape == (ROWS,)

    @pytest.mark.parametrize("column", ["path", "index"])
    def test_a_null(self, column: str, frame: pd.DataFrame) -> None:
        way = WAYS["path" if column == "path" else "dataset"]
        rows = frame.assign(index=frame["index"].astype("Int64"))
        model = fit(rows, **SETTINGS, **way)
        rows.loc[3, column] = None
        with pytest.raises(BadRow, match=f"column '{column}'.* is null in row 3"):
            fit(rows, **SETTINGS, **way)
        with pytest.raises(BadRow, match=f"column '{column}' is null in row 3"):
            model.predict(rows)
        kept = TorchModel(model, on_error="null").transform(rows)["prediction"]
        assert list(np.flatnonzero(kept.isna())) == [3]

    def test_another_type_in_prediction(self, frame: pd.DataFrame) -> None:
        model = fit(frame, **SETTINGS, **WAYS["dataset"])
        with pytest.raises(SignatureMismatch, match="column 'index' is double, and the model takes an integer"):
            model.predict(frame.assign(index=frame["index"].astype(float)))
        model = fit(frame, **SETTINGS, **WAYS["path"])
        with pytest.raises(SignatureMismatch, match="column 'path' is int64, and the model takes a string"):
            model.predict(frame.assign(path=frame["index"]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param({"decode": {"index": 3}}, BadSetting, r"decode={'index': 3} is neither a function", id="number"),
        pytest.param({"decode": {"index": "f"}}, BadSetting, "neither a function .* nor a dataset", id="text"),
        pytest.param({"decode": {"index": {1: 2}}}, BadSetting, "neither a function .* nor a dataset", id="mapping"),
        pytest.param(
            {"feature_cols": "path", "decode": {"path": Images()}},
            BadData,
            r"decode for 'features' is a dataset, which is read by an index, and column 'path' is",
            id="dataset-of-words",
        ),
        pytest.param(
            {"feature_cols": "x", "decode": {"x": of_number}},
            BadData,
            "only columns of bytes, strings and integers are decoded",
            id="floats",
        ),
        pytest.param(
            {"feature_cols": ["index", "x"], "decode": {"index": of_number}},
            BadData,
            "not packed with others",
            id="packed",
        ),
        pytest.param({"nulls": {"index": 0}}, BadData, "is decoded, and a null in it can't be filled", id="nulls"),
        pytest.param(
            {"feature_cols": "path", "decode": {"path": load}, "vocabulary": {"path": ["a"]}},
            BadData,
            "both decode and a vocabulary",
            id="vocabulary",
        ),
    ],
)
def test_wrong_settings(changes: dict[str, Any], error: Any, message: str, frame: pd.DataFrame) -> None:
    with pytest.raises(error, match=message):
        fit(frame, **SETTINGS | WAYS["dataset"] | changes)


def test_a_label_of_images(frame: pd.DataFrame) -> None:
    """As for segmentation: the label of a row is an array that is read by its path."""
    model = fit(
        frame,
        **SETTINGS | {"model": lambda: nn.Conv2d(3, 3, 1), "label_cols": "path"},
        feature_cols={"x": "index"},
        decode={"index": Images(), "path": load},
    )
    assert model.predict(frame).shape == (ROWS, 3, 2, 2)


def test_in_a_function_that_is_launched(frame: pd.DataFrame) -> None:
    def means() -> Any:
        found = []
        for epoch in tr.world().shard("train").epochs(1, batch_size=8, shuffle=False):
            found += [(batch["index"].mean((1, 2, 3)), batch["path"].mean((1, 2, 3))) for batch in epoch]
        return [np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*found, strict=True)]

    data = tr.Data(frame, columns=["index", "path"], decode={"index": Images(), "path": load})
    (found,) = tr.launch(means, on="here", data={"train": data}, progress=False)
    for values in found:
        np.testing.assert_allclose(values, frame["index"] / ROWS, rtol=1e-6)
    with pytest.raises(BadSetting, match=r"decode={'index': 3} is neither a function"):
        tr.Data(frame, decode={"index": 3})


@pytest.mark.processes
def test_a_dataset_goes_to_every_rank(frame: pd.DataFrame) -> None:
    settings = SETTINGS | WAYS["dataset"] | {"on": "driver", "ranks": 2}
    model = fit(frame, **settings)
    assert model.predict(frame).shape == (ROWS,)
