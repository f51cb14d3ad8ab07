"""The quickstart as its reader runs it: by a Python that is not activated, in Jupyter, and on a cluster's address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest

import advice
import clusters

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [code for _, code in advice.blocks(ROOT / "docs" / "quickstart.md", "python")]
MASTER = '.master("local[2]")'

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with the table where the page expects it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run this environment's Python as where nothing is activated, and return what it prints."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join(place for place in os.environ["PATH"].split(os.pathsep) if place != here)
    activated = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    rest = {name: value for name, value in os.environ.items() if name not in activated}
    env: Mapping[str, str] = {**rest, "PATH": path, **environment}
    ended = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def learnt(text: str) -> bool:
    """Return whether the network is better than the baseline by a third."""
    network, baseline = map(int, re.search(r"off by (\d+) bikes .* by (\d+)", text).groups())  # type: ignore[union-attr]
    return network < 2 / 3 * baseline


def test_by_a_python_that_is_not_activated(clone: Path) -> None:
    (clone / "bikes.py").write_text("\n".join(BLOCKS))
    printed = run(clone, "bikes.py")
    assert learnt(printed)
    assert "tritium: epoch 15/15, step 93/93" in printed
    assert (clone / "bikes.png").read_bytes().startswith(b"\x89PNG")


def test_in_jupyter(clone: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in BLOCKS])
    nbformat.write(notebook, clone / "bikes.ipynb")
    run(clone, "-m", "jupyter", "execute", "--inplace", "bikes.ipynb")
    cells = nbformat.read(clone / "bikes.ipynb", as_version=4).cells
    train = "".join(o.data.get("text/html", "") for o in cells[0].outputs if "data" in o)
    measure = "".join(o.get("text", "") for o in cells[1].outputs)
    assert "done after" in train
    assert learnt(measure)


def test_on_a_clusters_address(clone: Path) -> None:
    program = "\n".join(BLOCKS)
    assert MASTER in program
    with clusters.standalone() as url:
        (clone / "bikes.py").write_text(program.replace(MASTER, f'.master("{url}")'))
        assert learnt(run(clone, "bikes.py", PYSPARK_PYTHON=sys.executable))
