"""Directories of earlier runs: which there are, which `tritium clean` removes, and the note that there are many."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tritium as tr
from tritium import cli
from tritium.observe import runs
from tritium.observe.run_directory import new_run_dir

NOW = datetime.now(timezone.utc)


def clean(folder: Path, *words: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli.main, ["clean", str(folder), *words], input=answer)


def run_in(folder: Path, days: int, *, report: bool = True, **facts: Any) -> Path:
    """Make the directory of a run that was started so many days ago."""
    started = NOW - timedelta(days=days)
    path = folder / f"{started:%Y%m%d-%H%M%S}-{days:06x}"
    (path / "logs").mkdir(parents=True)
    path.joinpath("logs", "rank-0.log").write_text("x" * 1000)
    about = {"run": path.name, "started": started.isoformat(timespec="seconds"), "host": "elsewhere", "pid": 1}
    path.joinpath("run.json").write_text(json.dumps({**about, **facts}))
    if report:
        path.joinpath("report.json").write_text(json.dumps({"run": path.name}))
    return path


def left(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def ten(tmp_path: Path) -> list[Path]:
    """Make ten runs in a folder; return them, the newest first."""
    return [run_in(tmp_path, days) for days in range(10)]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--keep", "3"], 3),
        (["--older", "4.5"], 5),
        (["--keep", "7", "--older", "2"], 7),
        (["--keep", "1", "--older", "6"], 6),
    ],
)
def test_keeps_the_newest_and_the_young(words: list[str], kept: int, ten: list[Path], tmp_path: Path) -> None:
    result = clean(tmp_path, *words, "--yes")
    assert result.exit_code == 0, result.output
    assert f"Removed {10 - kept} runs." in result.output
    assert left(tmp_path) == sorted(path.name for path in ten[:kept])


def test_asks_first_and_removes_nothing_unasked(ten: list[Path], tmp_path: Path) -> None:
    for answer in ("n\n", "", None):
        result = clean(tmp_path, "--keep", "9", answer=answer)
        assert result.exit_code == 1
        assert f"{ten[9].name}  " in result.output
        assert "1 of the 10 runs" in result.output
        assert len(left(tmp_path)) == 10
    assert clean(tmp_path, "--keep", "9", answer="y\n").exit_code == 0
    assert not ten[9].exists()


def test_removes_only_ended_runs_that_tritium_named(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    here = {"host": socket.gethostname()}
    running = run_in(tmp_path, 5, report=False, pid=os.getpid(), **here)
    killed = run_in(tmp_path, 6, report=False, pid=int(gone.stdout), **here)
    elsewhere = run_in(tmp_path, 7, report=False)
    again = run_in(tmp_path, 8)
    again.joinpath("run.json").write_text(json.dumps({"run": "another", "started": NOW.isoformat()}))
    resumed = run_in(tmp_path, 9, pid=os.getpid(), **here)
    resumed.joinpath("report.json").write_text(json.dumps({"run": "an earlier one"}))
    named = run_in(tmp_path, 10).rename(tmp_path / "my-model")
    empty = tmp_path / "20200101-000000-abcdef"
    empty.mkdir()
    target = run_in(tmp_path / "outside", 11)
    link = tmp_path / target.name
    link.symlink_to(target)
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    result = clean(tmp_path, "--keep", "0", "--yes")
    assert "Removed 1 runs." in result.output
    assert "3 of those that stay may be running" in result.output
    assert not killed.exists()
    for stays in (running, elsewhere, again, resumed, named, empty, target, link, file):
        assert stays.exists(), stays.name


def test_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, words, said in (
        (tmp_path, [], "Say which runs to keep: tritium clean --keep 20"),
        (tmp_path / "none", ["--keep", "1"], "There is no directory"),
        ("s3://bucket/runs", ["--keep", "1"], "is no local directory"),
        (tmp_path, ["--keep", "-1"], "-1 is not in the range"),
    ):
        result = clean(place, *words)  # type: ignore[arg-type]
        assert result.exit_code != 0
        assert said in result.output
    assert "None of the 0 runs" in clean(tmp_path, "--keep", "1").output
    monkeypatch.setenv("TRITIUM_RUNS", str(tmp_path))
    run_in(tmp_path, 1)
    assert CliRunner().invoke(cli.main, ["clean", "--keep", "0", "--yes"]).output.endswith("Removed 1 runs.\n")


def test_a_real_run_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> list[bool]:
        return [run.ended for run in runs.kept_in(tmp_path)]

    monkeypatch.setenv("TRITIUM_RUNS", str(tmp_path))
    assert tr.launch(look, on="here", ranks=1, progress=False) == [[False]]
    assert look() == [True]


def test_a_note_once_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "_said", set())
    folder = tmp_path / "tritium-runs"
    assert runs.growth(None) == []
    for _ in range(runs.MANY + 1):
        Path(folder, new_run_dir(None)[0]).mkdir(parents=True)
    assert runs.growth(None) == []  # the tests' own TRITIUM_RUNS
    monkeypatch.delenv("TRITIUM_RUNS")
    assert runs.growth(str(tmp_path)) == []
    tr.launch(lambda: None, on="here", ranks=1, progress=False)
    (report,) = folder.glob("*/report.json")
    said = "21 runs are kept in tritium-runs: `tritium clean --keep 20` removes the oldest, and asks first"
    assert said in json.loads(report.read_text())["notes"]
    assert runs.growth(None) == []
