"""Every example of a framework runs, as a user would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).resolve().parents[2].joinpath("examples", "frameworks").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_it_runs(path: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    run = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=170
    )
    assert run.returncode == 0, run.stdout + run.stderr
