"""`tr.profile` of tables: its numbers are those of pandas, and it tells at once all that would be refused."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tritium as tr
from tritium.data.profiling.profile import Profile
from tritium.data.receiver import Receiver
from tritium.data.spool import Spool
from tritium.data.tables import Tables
from tritium.errors import BadData, BadSetting

NUMBERS = st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), min_size=1, max_size=40)


def column(profile: Profile, name: str) -> Any:
    (one,) = (one for one in profile.columns if one.name == name)
    return one


@given(NUMBERS, st.booleans())
def test_nulls_and_ranges_are_those_of_pandas(values: list[float | None], packed: bool) -> None:
    rows = pa.table({"x": pa.array(values, pa.float64()), "n": pa.array(range(len(values)), pa.int64())})
    profile = tr.profile(tr.Data(rows, {"f": ["x"] if packed else "x", "n": "n"}))
    series = pd.Series(values, dtype=object)
    known = series.dropna().astype(float) if len(series) else series
    present = [value for value in values if value is not None]
    finite = known[np.isfinite(known.to_numpy(float))]
    x = column(profile, "x")
    assert x.nulls == len(values) - len(present)
    assert x.nan == len(present) - len(finite)
    assert x.range == (None if not len(finite) else (finite.min(), finite.max()))
    assert column(profile, "n").range == (0, len(values) - 1)
    assert profile.refused == len(values) - len(finite)
    assert profile.ok == (profile.refused == 0)


def test_everything_that_would_be_refused_is_told_at_once() -> None:
    rows = pd.DataFrame(
        {
            "age": [1.0, np.nan, 3.0, np.inf],
            "color": ["red", "blue", "pink", None],
            "tags": [[1], [1, 2], [3], [4]],
            "name": list("abcd"),
            "when": [1.0, 2.0, 1e300, 4.0],
        }
    )
    data = tr.Data(rows, vocabulary={"color": ["red", "blue"]}, dtype={"when": "float32"}, nulls={"wrong": 0})
    profile = tr.profile(data, ranks=5)
    texts = "\n".join(profile.problems)
    for text in (
        "column 'name' is a string",
        "nulls names 'wrong', which is not read",
        "2 rows; the first: column 'age' is NaN in source partition 0",
        "2 rows; the first: column 'color' is 'pink'",
        "1 row; the first: column 'tags' is of length 2",
        "1 row; the first: column 'when' is 1e+300, beyond float32",
        "1 of 5 ranks would have no rows",
    ):
        assert text in texts
    assert profile.refused == 3
    assert column(profile, "tags").lengths == (1, 2)
    assert not profile.ok
    assert "would be refused:" in str(profile)
    html = profile._repr_html_()
    assert "Would be refused" in html
    assert "<td>age</td>" in html


def test_dates_and_times_are_shown_as_such() -> None:
    days = [datetime.date(2024, 1, 31), datetime.date(1969, 12, 31)]
    times = [datetime.datetime(2024, 1, 31, 12, 30), datetime.datetime(1970, 1, 1)]
    profile = tr.profile(pa.table({"day": days, "time": pa.array(times, pa.timestamp("us"))}))
    assert column(profile, "day").range == tuple(sorted(days))
    assert column(profile, "time").range == tuple(sorted(times))


@given(st.integers(1, 200), st.integers(1, 7))
def test_bytes_and_rows_of_a_rank_are_those_of_its_spool(rows: int, ranks: int) -> None:
    table = pa.table(
        {
            "x": np.arange(rows, dtype=np.float32),
            "s": [f"{i}" for i in range(rows)],
            "v": [[1.0, 2.0]] * rows,
            "hole": pa.array([None if i % 3 else 1.0 for i in range(rows)], pa.float64()),
        }
    )
    data = tr.Data(table, decode={"s": len}, nulls={"hole": "mask"})
    profile = tr.profile(data, ranks=ranks, batch_size=3)
    tables = Tables({"t": data}, ranks)
    written, counts = 0, []
    for rank in range(ranks):
        spool = Spool(tables.plan["t"])
        receiver = Receiver(tables.plan, {"t": spool}, sorted=True)
        for batch in tables.batches(rank):
            receiver.take(batch)
        counts.append(receiver.rows["t"])
        written += spool.bytes
        spool.close()
    assert profile.rank_rows == tuple(counts)
    assert profile.row_bytes * rows == pytest.approx(written)
    assert profile.steps == -(-max(counts) // 3)
    assert sum(profile.rank_bytes) == pytest.approx(written, abs=ranks)


def test_rows_that_go_together_are_counted_by_their_rank() -> None:
    table = pa.table({"query": [1, 1, 1, 2, 3, 3], "x": np.arange(6.0)})
    assert tr.profile(tr.Data(table, together="query"), ranks=2).rank_rows == (5, 1)


def test_only_the_rows_of_where_are_measured_and_a_null_in_it_is_told() -> None:
    table = pa.table({"x": np.arange(4.0), "held": [True, False, True, None]})
    profile = tr.profile(tr.Data(table, "x", where=("held", True)))
    assert (profile.rows, column(profile, "x").range) == (2, (0.0, 2.0))
    assert "the column of where= is null in 1 rows" in profile.problems[0]


def test_a_sample_is_scaled_up_to_ranks() -> None:
    table = pa.table({"x": np.arange(20_000.0)})
    profile = tr.profile(table, ranks=2, fraction=0.25)
    assert profile.rows == pytest.approx(5000, rel=0.1)
    assert profile.rank_rows[0] == pytest.approx(10_000, rel=0.1)
    assert "a sample of 0.25" in str(profile)


def test_steps_that_are_too_small_get_a_hint() -> None:
    table = pa.table({"x": np.arange(10_000.0)})
    (hint,) = tr.profile(table, ranks=2, batch_size=8).hints
    assert hint == (
        "a step of batch_size=8 reads 128 bytes a rank, less than it costs to begin one and to average over ranks: "
        "batch_size=1,024 takes 625 steps of an epoch down to 5, or take fewer ranks."
    )
    (hint,) = tr.profile(table, ranks=2, batch_size=8192).hints
    assert hint.startswith("an epoch is one step: batch_size=8,192 is no less than the 5,000 rows of a rank.")
    assert tr.profile(table, ranks=2, batch_size=2048).hints == ()


def test_no_rows() -> None:
    profile = tr.profile(pa.table({"x": pa.array([], pa.float64())}), ranks=2, batch_size=4)
    assert (profile.rows, profile.rank_rows, profile.steps) == (0, (0, 0), 0)
    assert "EmptyShard" in profile.problems[0]


def test_doubles_and_nanoseconds_are_told_beside_the_other_columns() -> None:
    table = pa.table([pa.array([1.0]), pa.array([2.0]), pa.array([1], pa.timestamp("ns"))], names=["x", "x", "t"])
    profile = tr.profile(table)
    assert any("there are 2 columns called 'x'" in text for text in profile.problems)
    assert any("does not become timestamp[us]" in text for text in profile.problems)
    assert profile.columns == ()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ranks": 0}, "ranks=0: it is a whole number"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"fraction": 0}, "fraction=0: it is the share"),
        ({"fraction": 1.5}, "fraction=1.5"),
    ],
)
def test_wrong_settings(settings: Any, text: str) -> None:
    with pytest.raises(BadSetting, match=text):
        tr.profile(pa.table({"x": [1.0]}), **settings)


def test_no_dataframe() -> None:
    with pytest.raises(BadData, match=r"data 'data' is a builtins\.list"):
        tr.profile([1, 2])
