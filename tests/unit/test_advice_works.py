"""An error's advice works: each test raises the error, extracts the advice from its text, and follows it."""

from __future__ import annotations

import decimal
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import tritium as tr
from tritium import errors
from tritium.ml import fit
from tritium.model.signature import Input, Output, Signature


def advised(error: BaseException, *fragments: str) -> list[dict[str, Any]]:
    """Return the message's fragments as keywords: `pad={x: 3}` is {"pad": {x: 3}}; `value` and [...] are filled in."""
    text = str(error)
    found = []
    for fragment in fragments:
        match = re.search(fragment, text)
        assert match, f"no {fragment!r} in: {text}"
        literal = match[0].replace("[...]", "words").replace("value", "0.0").replace("function", "decode")
        found.append(eval(f"dict({literal})", {"words": ["red", "blue"], "n": 3, "decode": decode}))
    return found


def decode(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8).astype("f4")


# --- data


def read(
    frame: Any, batch: int = 2, ranks: int = 1, remainder: str = "pad", device: Any = None, **settings: Any
) -> Any:
    """Return every batch column of one epoch of a gang of one in this process."""

    def rows() -> Any:
        epochs = tr.world().shard("train").epochs(1, batch_size=batch, remainder=remainder, device=device)
        return [dict(step) for epoch in epochs for step in epoch]

    on = "here" if ranks == 1 else "driver"
    data = {"train": tr.Data(frame, **settings)}
    return tr.launch(rows, on=on, ranks=ranks, data=data, progress=False)[0]


HOLES = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": pd.array([1, None, 3], "Int64")})
NANS = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [1.0, float("nan"), 3.0]})
LARGE = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [1.0, 1e300, 3.0]})
RAGGED = pa.table({"b": [[1.0], [1.0, 2.0, 3.0]]})
WORDS = pa.table({"w": ["red", "blue"]})
BOTH = {"vocabulary": {"w": ["red", "blue"]}, "hash_buckets": {"w": 3}}
WIDE = {"columns": {"x": ["a", "n"]}}

DATA: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "null": (HOLES, {}, errors.BadRow, [r"nulls=\{'b': value\}", r"nulls=\{'b': 'mask'\}"]),
    "NaN": (NANS, {}, errors.BadRow, [r"nan='keep'"]),
    "infinite": (LARGE.replace(1e300, float("inf")), {}, errors.BadRow, [r"nan='keep'"]),
    "beyond float32": (LARGE, {"dtype": "float32"}, errors.BadRow, [r"dtype='float64'"]),
    "ragged": (RAGGED, {}, errors.BadRow, [r"pad=\{'b': 3\}"]),
    "beyond its pad": (RAGGED, {"pad": {"b": 2}}, errors.BadRow, [r"pad=\{'b': 3\}"]),
    "unknown word": (WORDS, {"vocabulary": {"w": ["red"]}}, errors.BadRow, [r"vocabulary=\{'w': \[\.\.\.\]\}"]),
    "bytes on a device": (
        pa.table({"i": [b"ab", b"cd"]}),
        {"device": "cpu"},
        errors.BadSetting,
        [r"decode=\{'i': function\}", r"device=None"],
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_what_the_errors_of_data_advise_works(case: str) -> None:
    frame, settings, kind, fragments = DATA[case]
    with pytest.raises(kind) as caught:
        read(frame, **settings)
    for advice in advised(caught.value, *fragments):
        assert read(frame, **{**settings, **advice}), advice


@pytest.mark.parametrize("frame", [HOLES, NANS])
def test_rows_can_be_dropped_as_an_error_says(frame: pd.DataFrame) -> None:
    with pytest.raises(errors.BadRow, match=r"Drop such rows"):
        read(frame)
    assert sum(len(step["b"]) for step in read(frame.dropna(subset=["b"]))) == 2


@pytest.mark.parametrize(("hole", "codes"), [(math.nan, 2), (math.inf, 1)])
def test_what_is_advised_for_a_nan_is_code_for_pandas_too(hole: float, codes: int) -> None:
    """Code for a table of Spark's and of pandas' alike, and a setting of the estimator, which takes no tr.Data."""
    frame = FRAME.assign(a=[0.0, hole, 2.0, 3.0])
    with pytest.raises(errors.BadRow) as caught:
        fit(frame, **GOOD)
    found = re.findall(r"`(df[^`]+)`", str(caught.value))
    assert len(found) == codes
    for code in found:
        assert len(fit(eval(code, {"df": frame}), **GOOD).history) == 1, code
    assert "nan='keep' (of tr.Data in a launch, of the estimator)" in str(caught.value)


def test_a_choice_is_one_of_those_that_are_listed() -> None:
    for name in ("nan", "shuffle"):
        with pytest.raises(errors.BadData) as caught:
            read(NANS.dropna(), **{name: "nonsense"})
        listed = re.findall(r"'(\w+)'|(False)", str(caught.value).partition("Use ")[2])
        assert listed
        for word, false in listed:
            assert read(NANS.dropna(), **{name: False if false else word})


def test_an_unknown_word_may_be_hashed() -> None:
    with pytest.raises(errors.BadRow, match=r"unknown_words='keep' .*or with hash_buckets"):
        read(WORDS, vocabulary={"w": ["red"]})
    assert read(WORDS, vocabulary={"w": ["red"]}, unknown_words="keep")
    assert read(WORDS, hash_buckets={"w": 5})
    with pytest.raises(errors.BadData, match=r"Choose one"):
        read(WORDS, **BOTH)
    assert read(WORDS, vocabulary=BOTH["vocabulary"])


def test_a_column_that_does_not_fit_is_converted_or_left_out() -> None:
    frame = pa.table({"a": [1.0], "s": [{"x": 1.0}], "t": ["red"]})
    with pytest.raises(errors.BadData, match=r"columns=") as caught:
        read(frame)
    assert read(frame, columns=["a"])
    for advice in advised(caught.value, r"vocabulary=\{'t': \[\.\.\.\]\}", r"hash_buckets=\{'t': n\}"):
        assert read(frame, **advice)


def test_numbers_that_would_lose_digits_are_rounded_on_request() -> None:
    frame = pa.table({"d": [decimal.Decimal("1234567890123456789.5")]})
    with pytest.raises(errors.BadData, match=r"Ask for the rounding with `dtype` \('float64'\)"):
        read(frame)
    assert read(frame, dtype={"d": "float64"})
    mixed = pa.table({"a": [1.5], "n": [2**40]})
    with pytest.raises(errors.BadData) as caught:
        read(mixed, columns={"x": ["a", "n"]})
    for advice in advised(caught.value, r"dtype=\{'x': 'float64'\}"):
        assert read(mixed, columns={"x": ["a", "n"]}, **advice)


def test_a_wider_dtype() -> None:
    frame = pa.table({"n": [1, 300]})
    with pytest.raises(errors.BadRow, match=r"beyond the int8 that was asked for.*Ask for a wider dtype"):
        read(frame, dtype={"n": "int8"})
    assert read(frame, dtype={"n": "int16"})


def test_a_step_of_whole_batches() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0]})
    with pytest.raises(errors.EmptyShard) as caught:
        read(frame, batch=8, remainder="drop")
    (most,) = re.findall(r"batch_size of at most (\d+)", str(caught.value))
    assert read(frame, batch=int(most), remainder="drop")
    (pad,) = advised(caught.value, r"remainder='pad'")
    assert read(frame, batch=8, **pad)


@pytest.mark.processes
def test_fewer_ranks_for_few_rows() -> None:
    frame = pd.DataFrame({"a": [1.0]})
    with pytest.raises(errors.EmptyShard, match=r"Ask for fewer ranks"):
        read(frame, ranks=2)
    assert len(read(frame, ranks=1)) == 1


# --- gang


@pytest.mark.processes
def test_the_same_call_with_run_dir_goes_on() -> None:
    def train(fails: bool) -> int:
        world = tr.world()
        state = world.checkpoint.load()
        first = state.step if state else 0
        if fails:
            world.checkpoint.save({"x": 1}, step=3)
            world.checkpoint.wait()
            raise RuntimeError("the disk of the feature store is gone")
        return first

    with pytest.raises(errors.RankFailed) as caught:
        tr.launch(train, args=(True,), ranks=1, on="driver", progress=False)
    (again,) = advised(caught.value, r'run_dir="[^"]+"')
    assert tr.launch(train, args=(False,), ranks=1, on="driver", progress=False, **again) == [3]
    shutil.rmtree(again["run_dir"])


def test_a_later_checkpoint_is_loaded_or_left(tmp_path: Path) -> None:
    def save(step: int, load: bool) -> int:
        world = tr.world()
        if load:
            world.checkpoint.load()
        world.checkpoint.save({"x": 1}, step=step)
        return step

    def run(place: str, step: int, load: bool = False) -> Any:
        return tr.launch(save, args=(step, load), on="here", run_dir=str(tmp_path / place), progress=False)

    run("one", 5)
    with pytest.raises(errors.BadSetting, match=r"call world.checkpoint.load\(\) first.*choose another run_dir"):
        run("one", 3)
    with pytest.raises(errors.BadSetting):
        run("one", 3, load=True)  # loaded, the run continues from step 5: a step before it is still refused
    assert run("one", 6, load=True) == [6]
    assert run("two", 3) == [3]


# --- estimator

FRAME = pd.DataFrame({"a": [0.0, 1.0, 2.0, 3.0], "b": [1.0, 0.0, 1.0, 0.0], "w": [1.0] * 4, "y": [1.0, 2.0, 3.0, 4.0]})
GOOD: dict[str, Any] = {
    "model": lambda: nn.Linear(2, 1),
    "loss": nn.MSELoss(),
    "optimizer": torch.optim.SGD,
    "feature_cols": ["a", "b"],
    "label_cols": ["y"],
    "batch_size": 2,
    "on": "here",
    "verbose": False,
    "progress": False,
}


def square(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).mean()


def own_step(module: Any, batch: Any) -> Any:
    output = module(batch["features"])
    return square(output, batch["label"]), output


FIT: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "no loss": ({"loss": None}, r"Give loss=, or your own train_step=", {"loss": nn.MSELoss()}),
    "no loss: a step": ({"loss": None}, r"Give loss=, or your own train_step=", {"train_step": own_step}),
    "an optimizer": (
        {"optimizer": torch.optim.Adam(nn.Linear(1, 1).parameters())},
        r"lambda p: torch.optim.Adam\(p\)",
        {"optimizer": lambda p: torch.optim.Adam(p)},
    ),
    "a sum": ({"loss": nn.MSELoss(reduction="sum")}, r'Use reduction="mean"', {"loss": nn.MSELoss(reduction="mean")}),
    "a class for a loss": ({"loss": nn.MSELoss}, r"give an instance, MSELoss\(\)", {"loss": nn.MSELoss()}),
    "a loss without rows": (
        {"weight_col": "w", "loss": square},
        r'reduction="none"|weight the loss in a train_step',
        {"loss": nn.MSELoss(reduction="none")},
    ),
    "weights and a step": (
        {"weight_col": "w", "train_step": own_step},
        r'feature_cols=\{"x": \[…\], "w": \[\'w\'\]\} and batch\["w"\]',
        {
            "weight_col": None,
            "feature_cols": {"x": ["a", "b"], "w": ["w"]},
            "model": lambda: Weighed(),
            "train_step": lambda module, batch: weighed(module, batch),
        },
    ),
    "two batch sizes": ({"global_batch_size": 4}, r"contradict each other; give one", {"batch_size": None}),
    "a class with arguments": (
        {"model": nn.Linear},
        r"give an instance, or a function that makes one",
        {"model": nn.Linear(2, 1)},
    ),
    "an unknown choice": ({"remainder": "padd"}, r"Did you mean 'pad'\?", {"remainder": "pad"}),
    "an unknown metric": ({"metrics": "mae"}, r"a mapping from names to metrics", {"metrics": {"mae": square}}),
    "a metric twice": ({"metrics": [square, square]}, r"give a mapping", {"metrics": {"one": square, "two": square}}),
    "early stopping": (
        {"early_stopping": "3"},
        r"or EarlyStopping\(\.\.\.\)",
        {"early_stopping": tr.ml.EarlyStopping()},
    ),
}


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def weighed(module: Any, batch: Any) -> Any:
    output = module(batch["x"], batch["w"])
    return (batch["w"] * (output - batch["label"]) ** 2).mean(), output


@pytest.mark.parametrize("case", FIT)
def test_what_the_errors_of_a_training_advise_works(case: str) -> None:
    wrong, words, right = FIT[case]
    with pytest.raises((errors.BadSetting, errors.BadFunction, errors.BadData), match=words):
        fit(FRAME, **{**GOOD, **wrong})
    model = fit(FRAME, **{**GOOD, **wrong, **right})
    assert len(model.history) == 1


@pytest.mark.parametrize("column", ["word", "moment", "count", "third"])
def test_code_for_pandas_makes_numbers_of_a_column(column: str) -> None:
    frame = FRAME.assign(
        word=["red", "blue", "red", "blue"], moment=pd.Timestamp("2026-01-01 12:00"), count=[3, 4, 5, 6], third=[3] * 4
    )
    asked: dict[str, Any] = {"label_cols": column}
    if column == "moment":
        asked = {"feature_cols": ["a", column]}
    elif column != "count":
        asked |= {"loss": nn.CrossEntropyLoss(), "model": lambda: nn.Linear(2, 2)}
    with pytest.raises((errors.BadData, errors.BadRow), match="in pandas") as caught:
        fit(frame, **{**GOOD, **asked})
    (code,) = re.findall(rf"df\['{column}'\][.\w]+(?:\([\w']+\)[.\w]*)?", str(caught.value))
    made = eval(code, {"df": frame})
    assert fit(frame.assign(**{column: made}), **{**GOOD, **asked}).history


def test_a_global_batch_that_is_shared_out_evenly() -> None:
    settings = {**GOOD, "batch_size": None, "gradient_accumulation": 3}
    with pytest.raises(errors.BadSetting) as caught:
        fit(FRAME, **settings, global_batch_size=4)
    for size in re.findall(r"\d+", str(caught.value).partition("Use ")[2]):
        assert fit(FRAME, **settings, global_batch_size=int(size)).history


def test_another_run_dir_trains_from_the_beginning(tmp_path: Path) -> None:
    fit(FRAME, **GOOD, run_dir=str(tmp_path / "one"), checkpoint_every=1)
    with pytest.raises(
        errors.BadSetting, match=r"Name another run_dir to train from the beginning, or continue with what it was begun"
    ):
        fit(FRAME, **{**GOOD, "batch_size": 1}, run_dir=str(tmp_path / "one"), checkpoint_every=1)
    assert fit(FRAME, **{**GOOD, "batch_size": 1}, run_dir=str(tmp_path / "two"), checkpoint_every=1).history
    assert fit(FRAME, **GOOD, run_dir=str(tmp_path / "one"), checkpoint_every=1).history


def test_a_training_goes_on_over_other_rows_where_there_is_an_epoch_left(tmp_path: Path) -> None:
    rows = GOOD | {"run_dir": str(tmp_path / "one"), "checkpoint_every": 1}
    other = FRAME.assign(y=FRAME.y * 3 + 7)
    fit(FRAME, **rows)
    with pytest.raises(errors.DataChanged, match="of an estimator: if_data_changed=") as caught:
        fit(other, **rows, epochs=2)
    (restart,) = advised(caught.value, r'if_data_changed="restart"')
    with pytest.raises(errors.DataChanged, match=r"All epochs \(1\) had ended.*another run_dir"):
        fit(other, **rows, **restart)  # it used to be the model of the rows before
    assert len(fit(FRAME, **rows, **restart).history) == 1
    assert len(fit(other, **rows, **restart, epochs=2).history) == 2
    assert len(fit(other, **rows | {"run_dir": str(tmp_path / "two")}).history) == 1


# --- model

SIGNATURE = Signature((Input("x", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),))


def test_a_model_that_is_there_is_overwritten_or_another(tmp_path: Path) -> None:
    model = tr.Model(nn.Linear(2, 1), SIGNATURE)
    model.save(str(tmp_path / "m"))
    with pytest.raises(errors.BadSetting, match=r"Choose another path, or overwrite=True") as caught:
        model.save(str(tmp_path / "m"))
    model.save(str(tmp_path / "m"), **advised(caught.value, r"overwrite=True")[0])
    model.save(str(tmp_path / "other"))


TRUST: dict[str, Callable[[], Any]] = {
    "by value": lambda: tr.Model(nn.Linear(2, 1), SIGNATURE),
    "by name": lambda: tr.Model(Weighed(), SIGNATURE, origin="torch.hub:nonsense"),
}


@pytest.mark.parametrize("how", TRUST)
@pytest.mark.usefixtures("saved_elsewhere")
def test_a_model_is_trusted_as_the_error_says(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "nonsense", Weighed, raising=False)
    TRUST[how]().save(str(tmp_path / "m"))
    with pytest.raises(errors.UntrustedModel) as caught:
        tr.load(str(tmp_path / "m"))
    (trust,) = advised(caught.value, r"trusted=(True|'[^']+')")
    assert tr.load(str(tmp_path / "m"), **trust)


def test_a_device_that_is_there() -> None:
    model = tr.Model(nn.Linear(2, 1), SIGNATURE)
    with pytest.raises(errors.BadSetting) as caught:
        model.predict(FRAME, device="cuda:99")
    assert len(model.predict(FRAME, **advised(caught.value, r"device='cpu'")[0])) == 4


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_rows_that_a_model_can_not_take_are_dropped_or_filled(value: float | None) -> None:
    model = tr.Model(nn.Linear(2, 1), SIGNATURE)
    given = FRAME.assign(b=pd.array([1.0, None, 1.0, 1.0], "Float64"))
    frame = given if value is None else FRAME.assign(b=[1.0, value, 1.0, 1.0])
    with pytest.raises(errors.BadRow) as caught:
        model.predict(frame)
    (code,) = re.findall(r"Drop such rows before, (.+?)(?:, fill them.+)?, or let transform", str(caught.value))
    assert len(model.predict(eval(code, {"df": frame}))) == 3
    for code in re.findall(r"fill them, (df\.fillna\(.+?\))", str(caught.value)):
        assert len(model.predict(eval(code, {"df": frame, "value": 0}))) == 4
    assert ("fill them" in str(caught.value)) == (value is None or math.isnan(value))
