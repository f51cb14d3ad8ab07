"""Each run of the tests says how long each took, and `make quick` refuses a slow one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import subprocess, sys, time

def burn(seconds):
    while time.process_time() < seconds:
        pass

def test_fast():
    pass

def test_slow_by_itself():
    burn(time.process_time() + 0.3)

def test_slow_by_a_child():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"], check=True)
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *options, "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_run_measures_its_tests_and_refuses_slow_ones(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(TESTS)
    shutil.copy(Path(__file__).parents[1] / "durations.py", tmp_path)
    (tmp_path / "conftest.py").write_text(
        "import durations\nfrom durations import pytest_addoption\n\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(durations.Durations(config))\n"
    )
    refused = run(tmp_path, "--slowest-test=0.2")
    assert refused.returncode == 1, refused.stdout
    assert "FAILED: tests of more than 0.2 processor seconds" in refused.stdout
    assert "test_slow_by_itself" in refused.stdout
    assert "test_slow_by_a_child" in refused.stdout
    assert "test_fast" not in refused.stdout
    figures = json.loads((tmp_path / "artifacts" / "durations.json").read_text())
    processor = {name.partition("::")[2]: entry["processor"] for name, entry in figures.items()}
    assert processor["test_fast"] < 0.2
    assert processor["test_slow_by_itself"] >= 0.25
    assert processor["test_slow_by_a_child"] >= 0.25
    assert all(entry["seconds"] > 0 for entry in figures.values())

    assert run(tmp_path, "--slowest-test=0.2", "-k", "fast").returncode == 0
    assert len(json.loads((tmp_path / "artifacts" / "durations.json").read_text())) == 3  # of all runs
