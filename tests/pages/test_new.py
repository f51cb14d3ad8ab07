"""The project that `tritium new` writes trains, and its own test passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from tritium import cli


def test_the_project_runs_as_its_readme_says(tmp_path: Path) -> None:
    folder = tmp_path / "bikes"
    assert CliRunner().invoke(cli.main, ["new", str(folder)]).exit_code == 0
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
    for arguments in (["train.py"], ["-m", "pytest", "-q", "-p", "no:cacheprovider"]):
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "validation loss: " in ended.stdout or "1 passed" in ended.stdout
    assert (folder / "model").is_dir()
