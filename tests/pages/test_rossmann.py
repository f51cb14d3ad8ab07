"""examples/rossmann: its features against pandas, and the whole of it on a few stores."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import settled

ROOT = Path(__file__).resolve().parents[2] / "examples" / "rossmann"
STORES, DAYS, TEST_DAYS = 6, 420, 14

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on torch
]


@pytest.fixture(scope="module")
def example() -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a module of the example."""
    settled.settle_keras()
    there, backend = set(sys.modules), os.environ.get("KERAS_BACKEND")
    sys.path.insert(0, str(ROOT))
    yield importlib.import_module
    sys.path.remove(str(ROOT))
    for name in set(sys.modules) - there:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(ROOT)):
            del sys.modules[name]
    if backend is None:
        os.environ.pop("KERAS_BACKEND", None)


@pytest.fixture(scope="module")
def folder(example: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("rossmann"))
    example("generate").write(made, stores=STORES, days=DAYS, test_days=TEST_DAYS)
    return made


@pytest.fixture(scope="module")
def prepared(spark: Any, example: Callable[[str], Any], folder: str) -> Any:
    return example("features").prepare(spark, folder)


def table(folder: str, name: str, **options: Any) -> pd.DataFrame:
    return pd.read_csv(f"{folder}/{name}.csv", **options)


def test_the_files_have_the_shape_of_the_real_ones(example: Callable[[str], Any], folder: str, tmp_path: Path) -> None:
    example("generate").write(str(tmp_path), stores=STORES, days=DAYS, test_days=TEST_DAYS)
    for name in ("train", "test", "store", "store_states", "state_names", "weather", "googletrend"):
        assert Path(folder, f"{name}.csv").read_bytes() == (tmp_path / f"{name}.csv").read_bytes(), name
    train, test, store = (
        table(folder, name, parse_dates=["Date"] * (name != "store")) for name in ("train", "test", "store")
    )
    assert len(train) == STORES * DAYS
    assert train.Date.min() == pd.Timestamp("2013-01-01")
    assert test.Date.min() == train.Date.max() + pd.Timedelta(days=1)
    assert (train.Sales[train.Open == 0] == 0).all()
    assert (train.DayOfWeek == train.Date.dt.dayofweek + 1).all()
    assert (store.PromoInterval.isna() == (store.Promo2 == 0)).all()
    assert 0 < test.Open.isna().sum() <= 11
    by_promo = train[train.Sales > 0].groupby("Promo").Sales.mean()
    assert by_promo[1] > 1.2 * by_promo[0]


def test_features_are_those_that_pandas_computes(prepared: Any, folder: str) -> None:
    """Each part of them again, row by row, from the files."""
    train, test = (table(folder, name, parse_dates=["Date"], dtype={"StateHoliday": str}) for name in ("train", "test"))
    rows = pd.concat([train, test]).sort_values(["Store", "Date"]).reset_index(drop=True)
    rows = rows.merge(table(folder, "store"), on="Store").merge(table(folder, "store_states"), on="Store")
    for event in ("Promo", "StateHoliday", "SchoolHoliday"):
        of_event = rows[event].astype(str) != "0"
        for name, values in elapsed(rows, of_event).items():
            rows[name + event] = values
    names = table(folder, "state_names").rename(columns={"StateName": "file"})
    weather = table(folder, "weather", parse_dates=["Date"]).merge(names, on="file")
    rows = rows.merge(weather, on=["State", "Date"])
    trend = table(folder, "googletrend")
    trend["Date"] = pd.to_datetime(trend.week.str.split(" - ").str[0])
    trend["State"] = trend.file.str.removeprefix("Rossmann_DE").str.removeprefix("_").replace("NI", "HB,NI")
    rows["Sunday"] = rows.Date - pd.to_timedelta((rows.Date.dt.dayofweek + 1) % 7, "D")
    trend = trend.rename(columns={"Date": "Sunday"})
    rows = rows.merge(trend[["State", "Sunday", "trend"]], on=["State", "Sunday"], how="left")
    germany = trend[trend.State == ""][["Sunday", "trend"]].rename(columns={"trend": "trend_de"})
    rows = rows.merge(germany, on="Sunday")
    rows["CompetitionMonthsOpen"] = [months(row) for row in rows.itertuples()]
    rows["Promo2Weeks"] = [weeks(row) for row in rows.itertuples()]
    assert prepared.max_sales == train.Sales.max()

    found = pd.concat([prepared.train.toPandas(), prepared.test.toPandas()])
    found["Date"], found["Store"] = pd.to_datetime(found.Date), found.Store.astype(int)
    both = found.merge(rows, on=["Store", "Date"], suffixes=("", "_expected"), validate="one_to_one")
    assert len(both) == (train.Sales > 0).sum() + len(test)
    numbers = [f"{way}{event}" for way in ("After", "Before") for event in ("Promo", "StateHoliday", "SchoolHoliday")]
    numbers += ["Mean_TemperatureC", "CloudCover", "CompetitionDistance", "trend", "trend_de"]
    for name in [*numbers, "CompetitionMonthsOpen", "Promo2Weeks"]:
        np.testing.assert_array_equal(both[name].astype(float), both[f"{name}_expected"].fillna(0), err_msg=name)
    assert (both.Events == both.Events_expected.fillna("none")).all()
    assert (both.Week.astype(int) == both.Date.dt.isocalendar().week).all()
    np.testing.assert_allclose(np.exp(both.Sales.dropna()), both.Sales_expected.dropna(), rtol=1e-5)
    validated = found[found.Validation.eq(True)].Date
    a_year = pd.Timedelta(days=365)
    assert validated.min() >= test.Date.min() - a_year
    assert validated.max() <= test.Date.max() - a_year


def elapsed(rows: pd.DataFrame, of_event: pd.Series[bool]) -> dict[str, list[int]]:
    """Return days since the last and to the next event by walking over each store's rows."""
    found: dict[str, list[int]] = {}
    for way, step in (("After", 1), ("Before", -1)):
        values, store, last = [0] * len(rows), None, None
        for at in range(len(rows))[::step]:
            row = rows.iloc[at]
            if row.Store != store or of_event.iloc[at]:
                store, last = row.Store, row.Date
            values[at] = (row.Date - last).days
        found[way] = values
    return found


def months(row: Any) -> int:
    if np.isnan(row.CompetitionOpenSinceYear):
        return 0
    opened = pd.Timestamp(int(row.CompetitionOpenSinceYear), int(row.CompetitionOpenSinceMonth), 15)
    return int(np.clip((row.Date - opened).days // 30, 0, 24))


def weeks(row: Any) -> int:
    if np.isnan(row.Promo2SinceYear):
        return 0
    began = pd.Timestamp.fromisocalendar(int(row.Promo2SinceYear), int(row.Promo2SinceWeek), 1)
    return int(np.clip((row.Date - began).days // 7, 0, 25))


def test_indices_stand_for_the_words(spark: Any, example: Callable[[str], Any], prepared: Any) -> None:
    features = example("features")
    numbered = features.indexed(prepared)
    words, numbers = prepared.test.orderBy("Id").toPandas(), numbered.test.orderBy("Id").toPandas()
    for name in features.CATEGORICAL:
        assert [numbered.vocabulary[name][index] for index in numbers[name]] == list(words[name])


@pytest.mark.parametrize(("script", "rate"), [("with_tritium", 0.02), ("with_horovod_spark", 0.01)])
def test_from_files_to_a_submission(
    script: str,
    rate: float,  # which horovod.spark multiplies by two
    spark: Any,
    example: Callable[[str], Any],
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    submission = tmp_path / "submission.csv"
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    arguments = ["--submission", submission, "--epochs", 4, "--batch-size", 32, "--learning-rate", rate, "--hidden", 32]
    monkeypatch.setattr(sys, "argv", [script, folder, *map(str, arguments)])
    example(script).main()
    said = capsys.readouterr().out
    error = float(said.partition("best RMSPE ")[2].split()[0])
    assert error < 0.5, said
    test, found = table(folder, "test"), pd.read_csv(submission)
    assert list(found.Id) == list(test.Id)
    closed = test.Open == 0
    assert (found.Sales[closed] == 0).all()
    sold = found.Sales[~closed]
    train = table(folder, "train")
    assert 0.5 < sold.mean() / train.Sales[train.Sales > 0].mean() < 2
