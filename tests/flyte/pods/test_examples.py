"""The examples run: the second time from the cache, without a JVM."""

from __future__ import annotations

from pathlib import Path

import pytest

from workflows import Place

ROOT = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.timeout(1800)


def test_bikes(tmp_path: Path) -> None:
    place = Place(tmp_path)
    calls = [("bikes", [f"File.from_local_sync({str(ROOT / 'bike-sharing' / 'hour.csv')!r})", "2"])]
    first = place.play(ROOT / "flyte" / "bikes.py", calls)
    errors = first.outputs()[0]
    assert errors["prediction"] < 1.1 < 1.3 < errors["mean"]
    second = place.play(ROOT / "flyte" / "bikes.py", calls)
    assert (second.jvm, second.outputs()) == (False, first.outputs())
    calls[0][1][1] = "3"  # epochs
    third = place.play(ROOT / "flyte" / "bikes.py", calls)
    assert third.outputs() != first.outputs()
    ran = [task.partition(".")[2] for task, hit, _ in place.runs()[-5:] if not hit]
    assert ran == ["bikes", "train", "score"]


def test_rossmann(tmp_path: Path) -> None:
    place = Place(tmp_path)
    calls = [("rossmann", ["6", "420", "Hyperparameters(20, learning_rate=0.003, hidden=[32])"])]
    first = place.play(ROOT / "flyte" / "rossmann.py", calls)
    file, error, guess = first.outputs()
    assert "submission.csv" in file
    assert 0 < error < 2
    assert 0 < guess < 2
    second = place.play(ROOT / "flyte" / "rossmann.py", calls)
    assert (second.jvm, second.outputs()) == (False, first.outputs())
