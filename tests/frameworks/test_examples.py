"""Each script of examples/frameworks runs as it stands: it launches on two ranks and checks its result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "frameworks"


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    run = subprocess.run(
        command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False, timeout=170
    )
    assert run.returncode == 0, run.stdout + run.stderr
