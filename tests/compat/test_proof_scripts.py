"""The scripts that run others' tests and examples from a checkout, on a small checkout of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = [pytest.mark.timeout(300)]
TESTS = """
import os
import unittest
import horovod.torch as hvd

class Own(unittest.TestCase):
    def test_passes(self):
        hvd.init()
        assert hvd.rank() == int(os.environ["HOROVOD_RANK"]) and hvd.size() == 2

    def test_fails_on_one_rank(self):
        hvd.init()
        assert hvd.rank() == 0, "it is rank 1"

    def test_for_gpus(self):
        self.skipTest("No GPUs available")
"""


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_tests_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "test_own.py").write_text(TESTS)
    done = run("horovod_tests.py", tmp_path, "test_own.py", "--markdown")
    assert "| test_own.py | 3 | 1 | 1 | 1 | 0 | 0 |" in done.stdout, done.stdout + done.stderr
    assert "- test_own.py Own::test_fails_on_one_rank: rank 1: AssertionError: it is rank 1" in done.stdout
    assert "- test_own.py Own::test_for_gpus: No GPUs available" in done.stdout
    assert done.stdout.endswith("1 of 2 applicable tests pass: 50%\n")
    assert done.returncode == 1


def test_an_example_has_run_when_it_says_its_result(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    example = tmp_path / "examples" / "adasum" / "adasum_small_model.py"
    example.parent.mkdir(parents=True)
    body = "import sys\nimport horovod.torch as hvd\nhvd.init()\nprint(*sys.argv[1:])\n"
    example.write_text(f"{body}print(1.0, 'Adasum', 0.1, hvd.size(), 7)\n")
    done = run("horovod_examples.py", tmp_path, "adasum", "--markdown")
    assert "| adasum/adasum_small_model.py |  | none | runs: 1.0 Adasum 0.1 2 7 |" in done.stdout, done.stderr
    assert done.returncode == 0
    example.write_text(f"{body}raise KeyError('weights')\n")
    done = run("horovod_examples.py", tmp_path, "adasum")
    assert "fails: " in done.stdout
    assert "raised KeyError: 'weights'" in done.stdout
    assert done.returncode == 1
