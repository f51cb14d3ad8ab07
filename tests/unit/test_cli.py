"""The `tritium` command: its findings on a machine, its report of a run, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tritium
from tritium import cli
from tritium.cli import findings
from tritium.errors import RankFailed


def tritium_command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def java(folder: Path, says: str) -> str:
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return str(folder)


@pytest.mark.processes
def test_doctor_starts_two_ranks() -> None:
    result = tritium_command("doctor")
    assert result.exit_code == 0, result.output
    assert "two ranks" in result.output
    assert "Everything is in place." in result.output


@pytest.mark.parametrize(("says", "found"), [('version "1.8.0_392"', "1.8.0_392"), ("no runtime", "says no version")])
def test_doctor_names_what_mends_a_wrong_java(
    says: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", java(tmp_path, says))
    monkeypatch.setenv("COLUMNS", "300")
    result = tritium_command("doctor")
    assert result.exit_code == 1
    assert found in result.output
    assert "apt-get install openjdk-17-jre-headless" in result.output


def test_java_home_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert findings.java().result == f"no {tmp_path}/bin/java"
    monkeypatch.setenv("JAVA_HOME", java(tmp_path, 'openjdk version "21.0.2" 2024-01-16'))
    assert findings.java() == findings.Finding("Java", f"21.0.2, {tmp_path}/bin/java")


@pytest.mark.parametrize(("version", "fix"), [("3.5.9", "needs 4.0 or newer"), ("4.0.0.dev1", ""), ("5.0", "")])
def test_a_library_is_held_against_our_own_metadata(version: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings.importlib.metadata, "version", lambda name: version)
    assert findings.library("pyspark").fix.startswith(fix)
    assert bool(findings.library("pyspark").fix) == bool(fix)


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise findings.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(findings.importlib.metadata, "version", missing)
    assert findings.library("torch") == findings.Finding("torch", "not installed", 'pip install "tritium[torch]"')
    assert findings.library("numpy").fix == 'pip install "numpy>=1.26"'


def test_demo_outside_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "tritium" / "cli" / "__init__.py"))
    result = tritium_command("demo")
    assert result.exit_code == 1
    assert "Clone the repository and type `make demo`" in result.output


def _counted(fail: bool) -> int:
    world = tritium.world()
    world.log(loss=0.25)
    if fail and world.rank == 1:
        raise ValueError("no more bikes")
    return sum(batch.rows for epoch in world.shard("train").epochs(1, batch_size=4) for batch in epoch)


@pytest.mark.processes
@pytest.mark.parametrize("fail", [False, True])
def test_report_of_a_run(fail: bool, tmp_path: Path) -> None:
    import pyarrow as pa

    settings: dict[str, Any] = {"ranks": 2, "on": "driver", "run_dir": str(tmp_path), "progress": False}
    data = {"train": pa.table({"x": range(10)})}
    if fail:
        with pytest.raises(RankFailed):
            tritium.launch(_counted, args=(True,), data=data, **settings)
    else:
        assert sum(tritium.launch(_counted, args=(False,), data=data, **settings)) == 10
    result = tritium_command("report", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "loss 0.25" in result.output
    if fail:
        assert "failed after" in result.output
        assert "rank 1 failed (exception): ValueError no more bikes" in result.output
        assert "in _counted" in result.output
    else:
        assert "ended well" in result.output
        assert "train: rows 5, used 5, padded 0, dropped 0, repeated 0" in result.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("option", "setting"), [("--trace-torch=5-9", "torch:5-9"), ("--trace", "True"), ("--trace-torch=9-5", "")]
)
def test_run_traces(option: str, setting: str, tmp_path: Path) -> None:
    """A program without rows can't be profiled, and is refused before it starts."""
    (tmp_path / "train.py").write_text("")
    shown = tritium_command("run", "--run-dir", str(tmp_path / "run"), option, str(tmp_path / "train.py"))
    if setting == "True":
        settings = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])["settings"]
        assert settings["trace"] is True
    else:
        refusal = f"trace={setting!r} profiles steps" if setting else "trace='torch:9-5' is unknown"
        assert refusal in shown.output


@pytest.mark.processes
@pytest.mark.parametrize(("option", "tls"), [("--tls", True), ("--no-tls", False)])
def test_run_encrypts(option: str, tls: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    tritium_command("run", "--run-dir", str(tmp_path / "run"), option, str(tmp_path / "train.py"))
    settings = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])["settings"]
    assert settings["tls"] is tls


def test_report_of_no_run(tmp_path: Path) -> None:
    result = tritium_command("report", str(tmp_path))
    assert result.exit_code == 1
    assert "There is no" in result.output
    assert "report.json" in result.output


def test_new_writes_a_project_into_a_new_directory_only(tmp_path: Path) -> None:
    result = tritium_command("new", str(tmp_path / "bikes"))
    assert result.exit_code == 0, result.output
    names = {file.name for file in (tmp_path / "bikes").iterdir()}
    assert names == {"train.py", "test_train.py", "requirements.txt", "README.md"}
    assert (tmp_path / "bikes" / "README.md").read_text().startswith("# bikes\n")
    again = tritium_command("new", str(tmp_path / "bikes"))
    assert again.exit_code == 2
    assert "is there, and not empty" in again.output
