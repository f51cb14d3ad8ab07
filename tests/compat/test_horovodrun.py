"""`tritium horovodrun`, and the command `horovodrun` that it installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tritium.cli import main

RUN = "from tritium.cli import main; main()"
SCRIPT = """\
import sys
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
open(f"{sys.argv[1]}/{hvd.rank()}", "w").write(f"{hvd.size()} {total} {sys.argv[2:]}")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.timeout(300)
def test_ranks_run_the_program_and_its_exit_code_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("TRITIUM_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-c", RUN, "horovodrun", "-np", "2", "-H", "localhost:2", "--cycle-time-ms", "5"]
    script = [*command, "python", "-u", str(tmp_path / "train.py"), str(tmp_path), "0", "--lr"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing here needs --cycle-time-ms" in done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2 2.0 ['0', '--lr']"] * 2
    module = [*command, "python", "-m", "train", str(tmp_path), "3"]
    done = subprocess.run(module, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "sys.exit(3)" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-np", "2", "--mpi", "python", "x.py"], "horovodrun --mpi: ranks find each other without MPI."),
        (["-np", "2", "-H", "a:1,b:1", "python", "x.py"], "a is another host"),
        (["-np", "3", "-H", "localhost:2", "python", "x.py"], "3 ranks were asked for, and 2 slots given."),
        (["-np", "2", "-p", "22", "python", "x.py"], "--ssh-port: ranks on other hosts are tasks of Spark"),
        (["-np", "2", "--output-filename", "a", "python", "x.py"], "kept in the run directory"),
        (["-np", "2", "--hostfile", "none", "python", "x.py"], "there is no file none."),
        (["-np", "2", "--master", "local[2]", "-H", "localhost:2", "python", "x.py"], "Spark knows its hosts"),
        (["-np", "2", "python", "-c", "print(1)"], "names no script or module"),
        (["-np", "2", "python", "-O", "x.py"], "PYTHONOPTIMIZE"),
        (["-np", "2", "/other/bin/python", "x.py"], "ranks run this Python"),
        (["python", "x.py"], "How many ranks? -np 2"),
        (["-np", "2"], "What is to be run?"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["horovodrun", *arguments])
    assert result.exit_code != 0
    assert says in " ".join(result.output.split())


def test_check_build_says_what_there_is() -> None:
    result = CliRunner().invoke(main, ["horovodrun", "--check-build"])
    assert result.exit_code == 0
    assert "[X] PyTorch" in result.output
    assert "[ ] MPI" in result.output
    assert "[X] Gloo" in result.output


def test_a_command_is_installed_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    first = CliRunner().invoke(main, ["horovodrun", "--install"])
    assert first.exit_code == 0, first.output
    again = CliRunner().invoke(main, ["horovodrun", "--install"])
    assert again.exit_code == 1
    assert "There is a command horovodrun" in again.output
    script = tmp_path / "horovodrun"
    assert script.read_text().startswith(f"#!{tmp_path}/python\n")
    done = subprocess.run([python, str(script), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tritium horovodrun, version ")
