"""The row of a table that can't be used, as the user knows it, and what else is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from tritium.errors import BadRow
from tritium.gang.driver import bad_rows

QUIET: dict[str, Any] = {"on": "here", "progress": False, "output": "none"}


def refused(frame: Any, **settings: Any) -> BadRow:
    data = {"train": tr.Data(frame, {"x": ["a", "b"], "c": "c"}, **settings)}
    with pytest.raises(BadRow) as caught:
        tr.launch(lambda: None, data=data, **QUIET)
    return caught.value


def frame() -> pd.DataFrame:
    rows = pd.DataFrame({"id": [f"r{i}" for i in range(30)][::-1], "a": np.arange(30.0), "b": np.arange(30.0)})
    rows["c"] = pd.array([None, 2] + [3] * 28, dtype="Int64")
    rows["late"] = rows.index >= 10
    rows.loc[[14, 15], "a"], rows.loc[25, "b"] = np.nan, np.nan
    return rows


def test_the_row_is_that_of_the_users_table_and_all_columns_are_counted_at_once() -> None:
    error = refused(frame(), where=("late", True))
    assert "column 'a' (in batch column 'x') is NaN in row 14." in str(error)
    assert "Of its 20 rows 'a' is NaN in 2, 'b' is NaN in 1." in str(error)
    assert "on_error='skip'" in str(error)
    assert "'c' is null in 1" in str(refused(frame()))


def test_a_row_key_names_it() -> None:
    error = refused(frame(), row_key="id")
    assert "is NaN in the row with id='r15' (row 14)." in str(error) or "id='r14' (row 15)." in str(error)
    assert error.row_key in ({"id": "r15"}, {"id": "r14"})


def test_what_is_filled_or_kept_is_not_counted() -> None:
    error = refused(frame(), nan="keep")
    assert "Of its 30 rows 'c' is null in 1." in str(error)
    error = refused(frame(), nulls={"c": 0})
    assert "'c' is" not in str(error)


def test_a_look_that_fails_does_not_hide_the_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("gone")

    monkeypatch.setattr(bad_rows, "_in_table", fail)
    with pytest.raises(BadRow, match=r"column 'c' is null in row \d+ of source partition 0"):
        tr.launch(lambda: None, data={"train": tr.Data(frame(), ["c"])}, run_dir=str(tmp_path), **QUIET)
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert [e["text"] for e in events if e["kind"] == "note"] == ["the row could not be looked up: KeyError('gone')"]
