"""What the pages show runs: each page's Python blocks, one after the other, as one program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md", "docs/launch.md", "docs/data.md", "docs/errors.md", "docs/checkpoints.md")


def program(page: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run(page: str, tmp_path: Path) -> None:
    tmp_path.joinpath("page.py").write_text(f'if __name__ == "__main__":\n{_indented(program(page))}')
    command = [sys.executable, "page.py"]
    run = subprocess.run(
        command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False, timeout=170
    )
    assert run.returncode == 0, run.stdout + run.stderr
    if page == "docs/quickstart.md":
        assert run.stdout.rstrip().endswith("[4000, 4000]")


def test_the_readme_example_has_fifteen_lines() -> None:
    assert len([line for line in program("README.md").splitlines() if line.strip()]) <= 15


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())
