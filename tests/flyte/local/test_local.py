"""Workflows in one process, without a backend: what a gang returns, what the cache keeps, what becomes of errors."""

from __future__ import annotations

import re

import pytest

from workflows import FOLDER, Place

BASICS = FOLDER / "basics.py"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("flyte"))


def test_a_gang_its_errors_and_the_report(place: Place) -> None:
    marker = str(place.folder / "marker")
    calls = [
        ("whole", ["10", "2"]),
        ("coroutine", ["5"]),
        ("settings", []),
        ("divides", []),
        ("dies_once", [repr(marker)]),
        ("wants_memory", []),
        ("refuses", ["'no'"]),
        ("is_cut_off", []),
        ("count", ["Table('/nowhere/rows')"]),
        ("loads", ["SavedModel(path='/nowhere/model')"]),
    ]
    played = place.play(BASICS, calls)
    assert played.jvm
    assert played.outputs(0) == [{"sum": 90.0, "ranks": 2.0}]
    assert played.outputs(1) == [6]
    conf = played.outputs(2)[0]
    assert (conf["spark.sql.shuffle.partitions"], conf["spark.ui.enabled"]) == ("3", "false")
    assert re.fullmatch(r"local\[\d+\]", conf["spark.master"])
    divided, _, memory, refused, cut_off, gone, _ = played.answers[3:]
    assert (divided["error"], divided["code"]) == ("RuntimeUserError", "ZeroDivisionError")
    assert "ZeroDivisionError: division by zero" in divided["text"]
    assert "Its traceback (rank 1)" in divided["text"]
    assert played.outputs(4) == [2]
    assert (memory["error"], memory["code"]) == ("OOMError", "OOM")
    assert (refused["code"], refused["kind"], refused["text"]) == ("ValueError", "user", "no")
    assert (cut_off["code"], cut_off["kind"]) == ("ConnectionResetError", "system")
    assert gone["code"] == "TableGone"
    assert "The rows of /nowhere/rows can't be read any more" in gone["text"]
    assert played.outputs(9) == ["/nowhere/model"]
    attempts = {task: count for task, _, count in place.runs()}
    expected = {
        "gang.divides": 1,
        "once.dies_once": 2,
        "gang.wants_memory": 1,
        "spark.refuses": 1,
        "spark.is_cut_off": 2,
    }
    assert {task: attempts[task] for task in expected} == expected
    reports = "".join(place.reports())
    assert "succeeded after" in reports
    assert "ZeroDivisionError" in reports


def test_the_second_time_comes_from_the_cache_and_starts_no_jvm(place: Place) -> None:
    played = place.play(BASICS, [("whole", ["10", "2"])])
    assert not played.jvm
    assert played.outputs() == [{"sum": 90.0, "ranks": 2.0}]
    assert place.runs()[-2:] == [("spark.rows", True, 0), ("gang.total", True, 0)]
