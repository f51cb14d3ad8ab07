"""A position saved in one run and continued in the next: on the same rows, on them in another order, on others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from tritium.errors import BadData, BadSetting, DataChanged

pytestmark = pytest.mark.processes

ROWS = 23


def frame(order: np.ndarray | None = None) -> pd.DataFrame:
    order = np.arange(ROWS) if order is None else order
    return pd.DataFrame({"key": order, "x": order * 1.5})


BACKWARDS = frame(np.arange(ROWS)[::-1])


def launch(fn: Callable[..., Any], data: Any, run_dir: Path, *args: Any, ranks: int = 2) -> list[Any]:
    return tr.launch(
        fn,
        ranks=ranks,
        on="driver",
        progress=False,
        output="none",
        data={"train": data},
        args=args,
        run_dir=str(run_dir),
    )


def begin(epoch: int, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Return, in a rank, the rows of the first steps of an epoch, and the position after them."""
    shard, rows, before = tr.world().shard("train"), list[float](), dict[str, Any]()
    for taken in shard.epochs(3, batch_size=3, seed=5):
        for batch in taken:
            if taken.number == epoch and batch.step >= steps:
                return rows, before
            if taken.number == epoch:
                rows += batch["x"][: batch.rows].tolist()
            before = json.loads(json.dumps(shard.state()))
    raise AssertionError


def resume_with(states: list[dict[str, Any]], **settings: Any) -> list[tuple[int, list[float]]]:
    """Return, in a rank, the remaining rows by epoch."""
    found = []
    for epoch in tr.world().shard("train").epochs(3, batch_size=3, seed=5, resume=states, **settings):
        found.append((epoch.number, [x for batch in epoch for x in batch["x"][: batch.rows].tolist()]))
    return found


def first(found: list[list[tuple[int, list[float]]]]) -> list[float]:
    """Return the rows of all ranks in the first epoch that they took."""
    return [x for epochs in found for x in epochs[0][1]]


def notes(folder: Path) -> list[str]:
    return list(json.loads((folder / "report.json").read_text())["notes"])


def test_the_same_rows_go_on_exactly(tmp_path: Path) -> None:
    begun = launch(begin, frame(), tmp_path / "a", 1, 2)
    found = launch(resume_with, frame(), tmp_path / "b", [state for _, state in begun])
    assert [number for number, _ in found[0]] == [1, 2]
    assert sorted([x for rows, _ in begun for x in rows] + first(found)) == sorted(frame().x)
    assert notes(tmp_path / "b") == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_rows_with_other_ids_start_the_epoch_over_with_a_note(ranks: int, tmp_path: Path) -> None:
    begun = launch(begin, frame(), tmp_path / "a", 1, 2)
    found = launch(resume_with, BACKWARDS, tmp_path / "b", [state for _, state in begun], ranks=ranks)
    assert [number for number, _ in found[0]] == [1, 2]
    assert sorted(first(found)) == sorted(frame().x)
    (note,) = notes(tmp_path / "b")
    assert note.startswith(
        "shard 'train': Spark gave the same rows other ids this time, so epoch 2 starts over (after step 2)."
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_order_of_another_version_starts_the_epoch_over_with_a_note(ranks: int, tmp_path: Path) -> None:
    begun = launch(begin, frame(), tmp_path / "a", 1, 2)
    states = [{**state, "order": state["order"] - 1} for _, state in begun]
    found = launch(resume_with, frame(), tmp_path / "b", states, ranks=ranks)
    assert sorted(first(found)) == sorted(frame().x)
    assert notes(tmp_path / "b") == [
        "shard 'train': another version of Tritium ordered its rows otherwise, so epoch 2 starts over (after step 2)."
    ]


@pytest.mark.parametrize("key", ["key", ["x", "key"]])
def test_a_row_key_keeps_the_ids(key: Any, tmp_path: Path) -> None:
    begun = launch(begin, tr.Data(frame(), row_key=key), tmp_path / "a", 1, 2)
    found = launch(resume_with, tr.Data(BACKWARDS, row_key=key), tmp_path / "b", [state for _, state in begun])
    assert sorted([x for rows, _ in begun for x in rows] + first(found)) == sorted(frame().x)
    assert notes(tmp_path / "b") == []


def changed() -> pd.DataFrame:
    other = frame()
    other.loc[7, "x"] = -1.0
    return other


@pytest.mark.parametrize("steps", [0, 2])
def test_rows_that_changed_are_refused_with_the_numbers(steps: int, tmp_path: Path) -> None:
    begun = launch(begin, frame(), tmp_path / "a", 1, steps)
    states = [state for _, state in begun]
    with pytest.raises(DataChanged) as caught:
        launch(resume_with, changed(), tmp_path / "b", states)
    assert "23 rows, were 23; 1 of 1 source partitions differ (partition 0: 23 rows, others)" in str(caught.value)
    with pytest.raises(DataChanged, match=r"20 rows, were 23; .*partition 0: 20 rows, were 23"):
        launch(resume_with, frame()[:20], tmp_path / "c", states)


def test_the_epoch_starts_over_with_changed_rows_where_that_is_asked_for(tmp_path: Path) -> None:
    def fresh(states: list[dict[str, Any]]) -> Any:
        return resume_with(states, if_changed="restart")

    begun = launch(begin, frame(), tmp_path / "a", 1, 2)
    found = launch(fresh, changed(), tmp_path / "b", [state for _, state in begun])
    assert sorted(first(found)) == sorted(changed().x)
    assert "its rows have changed, so epoch 2 starts over" in notes(tmp_path / "b")[0]


def test_what_is_no_setting(tmp_path: Path) -> None:
    def wrong() -> None:
        tr.world().shard("train").epochs(1, batch_size=1, if_changed="restat")

    with pytest.raises(
        BadSetting, match=r"if_changed='restat' is none of 'refuse', 'restart'\. Did you mean 'restart'"
    ):
        launch(wrong, frame(), tmp_path / "a")
    with pytest.raises(BadData, match=r"row_key names 'kee', which is not there\. Did you mean 'key'"):
        launch(begin, tr.Data(frame(), row_key="kee"), tmp_path / "b", 1, 2)
