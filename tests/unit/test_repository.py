"""The repository as others get it: no paths or addresses of a machine, and the pinned versions are those that run."""

from __future__ import annotations

import csv
import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git clone")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def pinned() -> dict[str, str]:
    """Return name → version, of the lines of constraints.txt for this Python and this platform."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        match = re.fullmatch(r"([a-z0-9-]+)==([\w.]+)(?: ; (.+))?", line)
        assert match, f"constraints.txt holds names and versions only: {line!r}"
        if match[3] is None or Marker(match[3]).evaluate():
            found[match[1]] = match[2]
    return found


def test_no_path_of_one_machine() -> None:
    own = re.compile(r"(?<![\w.])/(?:root|home/\w+|Users/\w+|work)/\w")
    for path in tracked():
        if path.suffix in {".py", ".md", ".toml", ".txt", ".sh", ".yml", ".xml", ""}:
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not own.search(text), f"{path.relative_to(ROOT)}: {own.search(text)}"


def test_what_is_pinned_is_what_runs() -> None:
    versions = pinned()
    different = {}
    for name, version in versions.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform's torch
        if installed.partition("+")[0] != version:
            different[name] = (installed, version)
    assert not different, "installed and pinned differ; run make setup, or make constraints"


def test_every_requirement_is_pinned() -> None:
    rules = [Requirement(text) for text in importlib.metadata.requires("tritium") or ()]
    extras = ("", "spark", "torch", "demo", "docs", "dev")
    wanted = {
        rule.name.lower()
        for rule in rules
        if rule.marker is None or any(rule.marker.evaluate({"extra": extra}) for extra in extras)
    }
    assert wanted - {"tritium"} <= pinned().keys()


def test_all_distributions_have_one_version() -> None:
    kernel = (ROOT / "pyproject.toml").read_text()
    version = re.findall(r'^version = "(.*)"', kernel, re.M)
    for name in ("compat", "flyte"):
        text = (ROOT / "packages" / f"tritium-{name}" / "pyproject.toml").read_text()
        assert re.findall(r'^version = "(.*)"', text, re.M) == version
        assert re.findall(rf'^{name} = \["tritium-{name}==(.*)"\]', kernel, re.M) == version
        assert re.findall(r'^dependencies = \["tritium==([^"]*)"', text, re.M) == version


def test_every_extra_has_code_that_imports_it() -> None:
    source = "\n".join(p.read_text() for folder in ("src", "examples") for p in (ROOT / folder).rglob("*.py"))
    rules = [Requirement(text) for text in importlib.metadata.requires("tritium") or ()]
    extras = set(importlib.metadata.metadata("tritium").get_all("Provides-Extra") or ())
    for extra in extras - {"dev", "docs"}:  # tools of who works on Tritium
        names = [r.name for r in rules if r.marker is not None and r.marker.evaluate({"extra": extra})]
        used = [n for n in names if re.search(rf"^\s*(?:import|from) {n.replace('-', '_')}\b", source, re.MULTILINE)]
        assert used, f"no code imports anything of the extra {extra!r}: {names}"


def test_the_example_is_short() -> None:
    assert len((ROOT / "examples" / "bike_sharing.py").read_text().splitlines()) <= 80


def test_the_data_goes_with_its_citation() -> None:
    text = (ROOT / "examples" / "bike-sharing" / "Readme.txt").read_text()
    assert "Fanaee-T, Hadi, and Gama, Joao" in text
    with (ROOT / "examples" / "bike-sharing" / "hour.csv").open(newline="") as file:
        assert [row["instant"] for row in csv.DictReader(file)] == [str(n) for n in range(1, 17_380)]


def test_every_decision_has_the_four_parts() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [path.name[:3] for path in decisions] == [f"{n:03d}" for n in range(1, len(decisions) + 1)]
    for path in decisions:
        heads = re.findall(r"^\*\*(.+?)\.\*\*", path.read_text(), re.MULTILINE)
        assert heads == ["Context", "Decision", "Cost", "What would change our mind"], path.name
