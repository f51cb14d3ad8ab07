"""The page about failures: its program is killed in the middle, and continues when it is started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import advice
import clusters

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks" / "failures.md"
(LONG,) = [code for _, code in advice.blocks(PAGE, "python") if 'run_dir="long-run"' in code]

pytestmark = pytest.mark.timeout(300)


def test_a_killed_driver_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(LONG)
    command = [sys.executable, "long.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        saved = tmp_path / "long-run" / "checkpoints"
        clusters.wait(lambda: any(saved.glob("*/manifest.json")), "a checkpoint is complete")
        first.kill()
        first.communicate()  # its ranks have its output open, and end by themselves
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    printed = again.stdout + again.stderr
    assert again.returncode == 0, printed
    assert "tritium: a training in" in printed
    assert "continues from the checkpoint of step" in printed
    assert "10 epochs" in printed
