"""Every example runs, as a user would start it; those of the gallery small."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from . import in_turn

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGES = sorted(page for page in (ROOT / "docs" / "gallery").glob("*.md") if page.stem != "index")
SHOWN = {page.stem: ROOT / re.findall(r"examples/\w+\.(?:py|ipynb)", page.read_text())[0] for page in PAGES}
PROGRAMS = [
    path
    for path in sorted(EXAMPLES.joinpath("frameworks").glob("*.py")) + sorted(EXAMPLES.glob("*.py"))
    if path.stem != "bike_sharing"  # test_demo.py
]


def environment() -> dict[str, str]:
    """Return a user's: an example sets PYSPARK_PYTHON, and imports what is installed (tests/lean)."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYSPARK_PYTHON", "PYTHONPATH")}
    return kept | {"EXAMPLE_SMALL": "1"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[in_turn.Programs]:
    programs = in_turn.Programs(tmp_path_factory.mktemp("examples"), environment())
    yield programs
    programs.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PROGRAMS, ids=[path.stem for path in PROGRAMS])
def test_it_runs(path: Path, programs: in_turn.Programs, tmp_path: Path) -> None:
    if path.stem.startswith("horovod") and find_spec("horovod") is None:
        pytest.skip("horovod is not installed: make horovod")
    printed = programs.run(path, tmp_path)
    if path in SHOWN.values():
        (picture,) = re.findall("^picture: (.+)$", printed, re.MULTILINE)
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, tmp_path: Path) -> None:
    """From the first cell to the last, and its cells have pictures; in the repository they are empty."""
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)
    notebook = shutil.copy(path, tmp_path)
    command = [str(Path(sys.executable).with_name("jupyter-execute")), "--inplace", notebook]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outputs = [output for cell in nbformat.read(notebook, as_version=4).cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "picture: " in "".join(output.get("text", "") for output in outputs)


def test_the_index_has_a_card_for_each_page() -> None:
    index = (ROOT / "docs" / "gallery" / "index.md").read_text()
    for page in PAGES:
        assert f"[![]({page.stem}.png)]({page.stem}.md)" in index, page.stem
    for example in EXAMPLES.rglob("*.py"):
        folder = example.relative_to(EXAMPLES).parts[0]
        assert example in SHOWN.values() or f"examples/{folder}" in index, example


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_fits_its_page(name: str) -> None:
    """At most 120 lines of code; a small picture, and what it printed, on a page in the site's menu."""
    example, page = SHOWN[name], ROOT / "docs" / "gallery" / f"{name}.md"
    cells = nbformat.read(example, as_version=4).cells if example.suffix == ".ipynb" else []
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code") or example.read_text()
    assert len(code.splitlines()) <= 120
    assert page.with_suffix(".png").stat().st_size <= 60_000
    assert re.search(r"```text\n.*\d", page.read_text()), "no output: make examples"
    assert f"gallery/{name}.md" in (ROOT / "mkdocs.yml").read_text()
