"""Which rows of a table are validated on: drawn one by one, or by groups, whatever the form of the columns."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium.data.tables import Tables
from tritium.errors import BadData, BadSetting
from tritium.ml import TorchSettings
from tritium.ml.columns import as_frame
from tritium.ml.fitting import prepare
from tritium.ml.torch.backend import TorchBackend
from tritium.ml.validation import split

ROUNDS = int(os.environ.get("TRITIUM_ORACLE_ROUNDS", "8"))
HERE: dict[str, Any] = {"on": "here", "progress": False, "output": "none"}
SIGMAS = 5  # by chance, a sum of independent draws is farther from its mean once in a million


def settings(features: Any = "x", **more: Any) -> TorchSettings:
    fixed: dict[str, Any] = {"model": lambda: nn.Linear(1, 1), "loss": nn.MSELoss(), "optimizer": torch.optim.SGD}
    return TorchSettings(**fixed, feature_cols=features, label_cols=["y"], **more)


def held(frame: Any, features: Any = "x", **more: Any) -> np.ndarray[Any, Any]:
    """Return which rows of the frame are validated on."""
    rows = split(as_frame(frame, "train"), settings(features, **more))
    return np.array(rows.frame[rows.held].to_pylist())


def sigmas(count: float, draws: int, chance: float) -> float:
    """Return how far a number of successes is from its mean."""
    return abs(count - draws * chance) / max(1e-9, (draws * chance * (1 - chance)) ** 0.5)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_each_row_is_drawn_on_its_own_whatever_the_form_of_its_columns(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, distinct = int(random.integers(500, 4000)), int(random.integers(1, 40))
    fraction, draw = float(random.uniform(0.05, 0.6)), int(random.integers(0, 2**31))
    x = random.normal(size=(distinct, 3)).astype(np.float32)[random.integers(0, distinct, rows)]
    y = random.integers(0, 2, rows)
    columns = pa.table({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y})
    array = pa.table({"x": pa.array(list(x), pa.list_(pa.float32())), "y": y})
    vector = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 3), "y": y.astype("float64")})
    asked: dict[str, Any] = {"validation": fraction, "seed": draw}
    found = held(columns, ["a", "b", "c"], **asked)
    for frame, features in ((array, "x"), (vector, "x"), (array.to_pandas(), "x"), (columns, ["c"])):
        assert (held(frame, features, **asked) == found).all()
    assert sigmas(found.sum(), rows, fraction) < SIGMAS
    for value in (0, 1):  # of the label
        assert sigmas(found[y == value].sum(), int((y == value).sum()), fraction) < SIGMAS
    for row in np.unique(x, axis=0):  # of equal features
        same = (x == row).all(axis=1)
        assert sigmas(found[same].sum(), int(same.sum()), fraction) < SIGMAS
    pairs = found[1:] & found[:-1]
    assert sigmas(pairs.sum(), rows - 1, fraction**2) < 2 * SIGMAS, "neighbours are drawn independently"
    other = held(columns, ["a", "b", "c"], **(asked | {"seed": draw + 1}))
    assert sigmas((found & other).sum(), rows, fraction**2) < SIGMAS, "and so are seeds"


@pytest.mark.parametrize("kind", ["int64", "string", "category", "date32"])
def test_rows_of_a_group_are_on_one_side(kind: str) -> None:
    who = np.random.default_rng(3).integers(0, 300, 4000)
    values: Any = pa.array(who)
    if kind == "date32":
        values = values.cast(pa.int32()).cast(pa.date32())
    elif kind != "int64":
        values = pa.array([f"user {one}" for one in who])
        values = values.dictionary_encode() if kind == "category" else values
    frame = pa.table({"x": np.arange(4000.0), "y": np.arange(4000.0), "who": values})
    found = held(frame, validation=0.25, validation_group="who")
    by_group = pd.Series(found).groupby(who).nunique()
    assert (by_group == 1).all()
    assert sigmas(pd.Series(found).groupby(who).first().sum(), len(by_group), 0.25) < SIGMAS
    shuffled = frame.take(np.random.default_rng(4).permutation(4000))
    again = held(shuffled, validation=0.25, validation_group="who")
    assert sorted(shuffled.filter(again)["x"].to_pylist()) == sorted(frame.filter(found)["x"].to_pylist())


def test_a_row_key_draws_the_same_rows_in_any_order() -> None:
    frame = pa.table({"x": np.zeros(2000), "y": np.zeros(2000), "id": np.arange(2000)})
    found = held(frame, validation=0.3, row_key=["id", "x"])
    assert sigmas(found.sum(), 2000, 0.3) < SIGMAS
    turned = held(frame.take(np.arange(2000)[::-1]), validation=0.3, row_key=["id", "x"])
    assert (turned[::-1] == found).all()
    assert (held(frame, validation=0.3) != found).any()


def test_each_side_is_dealt_evenly_and_no_row_is_on_both() -> None:
    frame = pa.table({"x": np.arange(500.0), "y": np.zeros(500)})
    data = prepare(TorchBackend(), frame, settings(["x"], validation=0.2), tr.Gang(on="driver", ranks=3)).data
    tables = Tables(data, 3)
    sides: dict[str, list[list[float]]] = {"train": [], "validation": []}
    for rank in range(3):
        batches = list(tables.batches(rank))
        for position, name in enumerate(sides, start=2):
            structs = [batch.column(position).drop_null() for batch in batches]
            sides[name].append([value for struct in structs for row in struct.field(0).to_pylist() for value in row])
    for ranks in sides.values():
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    assert sorted(value for ranks in sides.values() for rank in ranks for value in rank) == list(range(500))


def test_words_of_rows_that_are_drawn_to_validate_are_learnt() -> None:
    """A word that one row has would else be unknown, and end the training, for every fifth seed."""
    frame = pa.table({"city": ["Rome", "Oslo", "Rome"] * 20 + ["Bonn"], "y": np.arange(61.0)})
    more: dict[str, Any] = {"feature_cols": {"city": "city"}, "label_cols": ["y"], "vocabulary": ["city"]}
    more |= {"model": City, "loss": nn.MSELoss(), "optimizer": torch.optim.SGD, "validation": 0.3}
    for seed in range(6):
        plan = prepare(TorchBackend(), frame, TorchSettings(**more, seed=seed), tr.Gang(on="here"))
        assert plan.settings.words()["city"] == ("Rome", "Oslo", "Bonn")


class City(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 1)

    def forward(self, city: torch.Tensor) -> Any:
        return self.rows(city)


def test_what_no_group_can_be_is_refused() -> None:
    frame = pa.table({"x": [1.0, 2.0], "y": [1.0, 2.0], "who": pa.array(["a", None])})
    for name, says in (
        ("whom", "validation_group names 'whom', which is not there. Did you mean 'who'"),
        ("x", "validation_group names 'x' of type double, and takes integers, strings, dates"),
        ("who", "column 'who' holds a null, and rows are drawn by its values"),
    ):
        with pytest.raises(BadData, match=says):
            held(frame, validation=0.5, validation_group=name)
    with pytest.raises(BadData, match="row_key names 'ids', which is not there"):
        held(frame, validation=0.5, row_key="ids")
    with pytest.raises(BadSetting, match=r"validation_group='who' says .* validation is 'held'. Give a fraction, such"):
        settings(validation="held", validation_group="who")
    with pytest.raises(BadSetting, match="validation is None"):
        settings(validation_group="who")
    with pytest.raises(BadSetting, match="must be the name of one column"):
        settings(validation=0.5, validation_group=["who"])


def test_where_reads_a_part_of_a_table() -> None:
    frame = pa.table({"x": np.arange(6.0), "late": [False, True, True, False, False, True]})
    parts = {name: tr.Data(frame, ["x"], where=("late", late)) for name, late in (("a", False), ("b", True))}
    tables = Tables(parts, 1)
    found = [
        [value for batch in tables.batches(0) for value in batch.column(position).drop_null().field(0).to_pylist()]
        for position in (2, 3)
    ]
    assert found == [[0, 3, 4], [1, 2, 5]]
    with pytest.raises(BadData, match="where names 'later', which is not there"):
        Tables({"a": tr.Data(frame, ["x"], where=("later", True))}, 1)
    with pytest.raises(BadData, match="where names 'x' of type double; it must be boolean"):
        Tables({"a": tr.Data(frame, ["x"], where=("x", True))}, 1)
    with pytest.raises(BadData, match="column 'late' of where= holds a null"):
        Tables({"a": tr.Data(frame.set_column(1, "late", [[None] * 6]).cast(frame.schema), where=("late", True))}, 1)
