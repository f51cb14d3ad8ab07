"""Tables by reference: versions of a Delta table, Parquet with a hash of its rows, and rows that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker import jars
from workflows import FOLDER, Place

FLOW = FOLDER / "deltas.py"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def delta() -> str:
    return ",".join(map(str, sorted(jars("delta", FOLDER / "pom.xml").glob("*.jar"))))


def test_a_version_stays_what_it_was(delta: str, tmp_path: Path) -> None:
    """After an append, an overwrite and VACUUM; a version counts once, and one that is gone says so, cached or not."""
    place, uri = Place(tmp_path), str(tmp_path / "numbers")
    newest, first, second = f"Table.delta({uri!r})", f"Table.delta({uri!r}, 0)", f"Table.delta({uri!r}, 1)"
    calls = [
        ("write", [repr(uri), "0", "10", "'append'"]),
        ("total", [newest]),
        ("write", [repr(uri), "10", "5", "'append'"]),
        ("total", [first]),
        ("total", [newest]),
        ("write", [repr(uri), "100", "1", "'overwrite'"]),
        ("total", [second]),
        ("total", [newest]),
        ("vacuum", [repr(uri)]),
        ("total", [newest]),
        ("total", [first]),
        ("total_again", [first]),
        ("total_again", [second]),
        ("total_again", [newest]),
    ]
    played = place.play(FLOW, calls, DELTA_JARS=delta)
    sums = [answer.get("outputs", [None])[0] for answer in played.answers]
    assert [sums[i] for i in (1, 3, 4, 6, 7, 9, 10, 13)] == [45, 45, 105, 105, 100, 100, 45, 100]
    hits = [hit for task, hit, _ in place.runs() if task == "delta.total"]
    assert hits == [False, True, False, True, False, False, True]  # VACUUM is a version of its own
    for number, version in ((11, 0), (12, 1)):
        assert played.answers[number]["code"] == "TableGone"
        assert f"The rows of version {version} of {uri} can't be read any more" in played.answers[number]["text"]
        assert "VACUUM" in played.answers[number]["text"]
        assert "Name a version that is still there" in played.answers[number]["text"]


def test_the_same_rows_elsewhere_are_the_same_table(delta: str, tmp_path: Path) -> None:
    """Also in another order, in other partitions; one row more is another table, and what was deleted says so."""
    place = Place(tmp_path)
    calls = [
        ("of_rows", ["[1, 2, 3]", "1"]),
        ("of_rows", ["[3, 1, 2]", "3"]),
        ("of_rows", ["[1, 2, 3, 4]", "1"]),
        ("of_deleted", ["[7]"]),
    ]
    played = place.play(FLOW, calls, DELTA_JARS=delta)
    assert [played.outputs(number) for number in range(3)] == [[6], [6], [10]]
    ran = [(task.partition(".")[2], hit) for task, hit, _ in place.runs() if not task.startswith("plain")]
    first = [("rewritten", False), ("total", False), ("rewritten", False), ("total", True)]
    assert ran[:6] == [*first, ("rewritten", False), ("total", False)]
    assert ran[6:] == [("rewritten", False), ("delete", False), ("rewritten", True), ("total", False)]
    assert played.answers[3]["code"] == "TableGone"
    assert 'cache(salt="2")' in played.answers[3]["text"]
