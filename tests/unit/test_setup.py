"""Set-up from nothing: a missing or wrong Java or Python is one message with the command that installs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "cat", "cksum", "dirname", "head", "sed", "tr")
GOOD_JAVA = "echo 'openjdk version \"21.0.2\" 2024-01-16' >&2"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a directory with the files that set-up reads of a clone, and `bin`, the only one on its PATH."""
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "scripts/pip-settings.sh"):
        target = tmp_path / "clone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    tmp_path.joinpath("bin").mkdir()
    for tool in TOOLS:
        tmp_path.joinpath("bin", tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def program(clone: Path, name: str, script: str) -> Path:
    path = clone / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def environment(clone: Path, python: str, uv: str) -> None:
    """Make a `.venv` with these scripts as its programs, and a suitable Java."""
    program(clone, "java", GOOD_JAVA)
    programs = clone / "clone" / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, script in (("python", python), ("uv", uv)):
        program(clone, name, script).rename(programs / name)


def set_up(clone: Path, *part: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(clone / "clone" / "scripts" / "setup.sh"), *part]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": str(clone / "bin"), **env}, timeout=30
    )


def refused(result: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    for text in (*texts, "apt-get install", "brew install", "conda install"):
        assert text in result.stderr


def test_no_java(clone: Path) -> None:
    refused(set_up(clone), "Spark needs Java 17", "found: no java")


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ('openjdk version "1.8.0_392"', "Java 1.8.0_392"),
        ('openjdk version "16" 2021-03-16', "Java 16"),
        ("Unable to locate a Java Runtime.", "Java that says no version"),  # macOS without a Java
    ],
)
def test_a_java_that_will_not_do(clone: Path, said: str, found: str) -> None:
    program(clone, "java", f"echo '{said}' >&2")
    refused(set_up(clone), "Spark needs Java 17", found)


def test_java_home_comes_before_the_path(clone: Path) -> None:
    program(clone, "java", GOOD_JAVA)
    refused(set_up(clone, JAVA_HOME="/nowhere"), "no /nowhere/bin/java (from JAVA_HOME)")


def test_no_python(clone: Path) -> None:
    program(clone, "java", GOOD_JAVA)
    refused(set_up(clone), "Tritium needs Python 3.10", "found: no python3")


def test_an_old_python(clone: Path) -> None:
    program(clone, "java", GOOD_JAVA)
    program(clone, "python3", '[ "$1" = --version ] && echo Python 3.9.18; exit 1')
    refused(set_up(clone), "Tritium needs Python 3.10", "found: Python 3.9.18")


def test_a_python_without_venv(clone: Path) -> None:
    program(clone, "java", GOOD_JAVA)
    program(clone, "python3", 'case "$*" in *ensurepip*) exit 1;; esac; echo Python 3.11.2')
    refused(set_up(clone), "can't make a virtual environment", "python3-venv")


def test_the_second_time_only_looks(clone: Path) -> None:
    environment(clone, *2 * [f"echo $* >>{clone}/calls"])
    first = set_up(clone)
    assert first.returncode == 0, first.stderr
    calls = clone / "calls"
    command = "pip install --quiet --compile-bytecode --python .venv/bin/python --constraints constraints.txt"
    assert command in calls.read_text()
    calls.unlink()
    assert set_up(clone).returncode == 0
    assert not calls.exists()
    with (clone / "clone" / "constraints.txt").open("a") as constraints:
        constraints.write("# changed\n")
    assert set_up(clone).returncode == 0
    assert calls.exists()


def test_the_tests_add_to_what_the_demo_needs(clone: Path) -> None:
    """And the demo needs nothing after them: each first, second, and after the other."""
    environment(clone, "exit 0", f'[ "$1" = pip ] && echo "$*" >>{clone}/calls')
    calls = clone / "calls"
    installed: list[list[str]] = []
    for part in (["demo"], ["demo"], [], [], ["demo"]):
        calls.unlink(missing_ok=True)
        # An index of pip's own must not be taken for the part: both were once named `extra`.
        result = set_up(clone, *part, PIP_EXTRA_INDEX_URL="INDEX")
        assert result.returncode == 0, result.stderr
        installed.append(calls.read_text().partition(" --editable ")[2].split() if calls.exists() else [])
    assert installed == [
        [".[demo]"],
        [],
        [
            ".[dev]",
            *("--editable", "packages/tritium-compat"),
            *("--editable", "packages/tritium-flyte"),
        ],
        [],
        [],
    ]


def test_a_part_that_there_is_not(clone: Path) -> None:
    result = set_up(clone, "dem")
    assert result.returncode == 2
    assert "dem: it is demo, or dev" in result.stderr


def test_what_no_environment_needs_leaves_uvs_cache(clone: Path) -> None:
    environment(clone, "exit 0", f'echo $1 $2 >>{clone}/calls; [ "$1" = pip ]')
    result = set_up(clone)
    assert clone.joinpath("calls").read_text() == "pip install\ncache prune\n"
    assert result.returncode == 0  # another uv may have locked it
    assert "could not be pruned" in result.stderr


def test_pip_lends_its_index_to_uv(clone: Path) -> None:
    python = 'case "$*" in *"config get global.index-url") echo INDEX;; *"config get"*) exit 1;; esac'
    environment(clone, python, f'echo "$1 ${{UV_DEFAULT_INDEX:-}} ${{UV_FIND_LINKS:-}}" >>{clone}/calls')
    assert set_up(clone, PIP_FIND_LINKS="/a /b").returncode == 0
    assert clone.joinpath("calls").read_text() == "pip INDEX /a,/b\ncache INDEX /a,/b\n"


def test_uv_keeps_an_index_of_its_own(clone: Path) -> None:
    environment(clone, "exit 0", f'echo "$UV_DEFAULT_INDEX" >{clone}/calls')
    assert set_up(clone, UV_DEFAULT_INDEX="OWN", PIP_INDEX_URL="PIP").returncode == 0
    assert clone.joinpath("calls").read_text() == "OWN\n"
