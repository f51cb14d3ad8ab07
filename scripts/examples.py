"""Run the gallery's examples whole, and write what they print and their pictures into its pages (`make examples`).

scripts/examples.py                  # all of them
scripts/examples.py digits           # some, by the names of their pages
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "gallery"
NOISE = ("tritium", "[rank ", "picture: ", "run directory: ")  # lines of progress, and paths


def source_of(page: Path) -> Path:
    """Return the example that a page shows: the first that it names."""
    return ROOT / re.findall(r"examples/\w+\.(?:py|ipynb)", page.read_text(encoding="utf-8"))[0]


def run(example: Path, folder: str) -> str:
    """Run an example or a notebook in a folder, and return what it printed."""
    if example.suffix == ".py":
        ended = subprocess.run([sys.executable, example], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
        return ended.stdout
    notebook = nbformat.read(example, as_version=4)
    NotebookClient(notebook, timeout=1800).execute(cwd=folder)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def main() -> None:
    names = sys.argv[1:] or sorted(page.stem for page in PAGES.glob("*.md") if page.stem != "index")
    table = []
    for page in (PAGES / f"{name}.md" for name in names):
        example, began = source_of(page), time.monotonic()
        print(f"== {example.relative_to(ROOT)}", flush=True)
        with tempfile.TemporaryDirectory(prefix="tritium-examples-") as folder:
            printed = run(example, folder)
            picture = Path(folder, re.findall("^picture: (.+)$", printed, re.MULTILINE)[-1])
            shutil.copyfile(picture, PAGES / f"{page.stem}.png")
        figures = [line for line in printed.splitlines() if line.strip() and not line.startswith(NOISE)]
        block = "```text\n" + "\n".join(figures) + "\n```"
        before, _, after = page.read_text(encoding="utf-8").partition("```text\n")
        page.write_text(before + block + after.partition("```")[2], encoding="utf-8")
        table.append((page.stem, f"{time.monotonic() - began:.0f} s", *figures[-2:]))
    for row in table:
        print(" | ".join(row))


if __name__ == "__main__":
    main()
