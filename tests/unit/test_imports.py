"""Imports point down, the front door is light, and what is public is a list."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tritium

PACKAGE = Path(tritium.__file__).parent
# From the front door down: a module imports from its own layer and from those below it.
LAYERS = ("", "cli", "ml", "predict", "gang", "frameworks", "model", "data", "observe", "wire ship errors")
PUBLIC = {"Data", "Exchange", "Gang", "Model", "World", "errors", "launch", "load", "ml", "world"}


def depth(module: str) -> int:
    """Where `tritium.data.spool` is in LAYERS."""
    name = [*module.split("."), ""][1]
    return next(number for number, layer in enumerate(LAYERS) if name == layer or name in layer.split())


def modules() -> dict[str, Path]:
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in paths]
    return {".".join(n[:-1] if n[-1] == "__init__" else n): p for n, p in zip(names, paths, strict=True)}


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every module of Tritium's that a file names: imports, also inside functions, and names given to importlib."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found = [f"{node.module}.{name.name}" for name in node.names]
            found = [name if name in known else str(node.module) for name in found]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
            found = [node.value] if node.value != "tritium" else []
        else:
            continue
        yield from ((node.lineno, name) for name in found if name.split(".")[0] == "tritium")


@pytest.mark.parametrize("module", [name for name in modules() if name != "tritium"])
def test_imports_point_down(module: str) -> None:
    upward = [f"line {line}: {name}" for line, name in imported(modules()[module]) if depth(name) < depth(module)]
    assert not upward, f"{module} imports from a layer above its own: {upward}"


def test_every_module_says_where_it_runs() -> None:
    where = ("driver", "supervisor", "rank", "any process", "Spark's Python worker")
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        if not tree.body:
            continue
        first = (ast.get_docstring(tree) or "").partition("\n\n")[0]
        assert any(place in " ".join(first.rpartition("(")[2].split()) for place in where), f"{name}: {first!r}"


def test_the_front_door_is_light() -> None:
    code = (
        "import sys, time; before = set(sys.modules); start = time.perf_counter(); import tritium\n"
        "print(time.perf_counter() - start, *sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    seconds = []
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        seconds.append(float(out[0]))
        assert not {"torch", "pyspark", "pandas", "pyarrow", "numpy"} & set(out[1:])
    assert min(seconds) < 0.15


def test_the_door_has_these_names() -> None:
    assert set(tritium.__all__) == PUBLIC
    assert all(getattr(tritium, name) is not None for name in PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'spool'"):
        tritium.spool  # noqa: B018


FRAMEWORKS = {path.parent.name for path in (PACKAGE / "ml").glob("*/__init__.py")}
SHARED = {name: path for name, path in modules().items() if path.parent == PACKAGE / "ml" and name != "tritium.ml"}


@pytest.mark.parametrize("module", SHARED)
def test_what_estimators_share_knows_no_framework(module: str) -> None:
    """A framework is handed in as a `Backend`; only the door `tritium.ml` names those that there are."""
    assert "torch" in FRAMEWORKS
    for node in ast.walk(ast.parse(SHARED[module].read_text())):
        if isinstance(node, ast.Import):
            found = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [str(node.module), *(f"{node.module}.{name.name}" for name in node.names)]
        else:
            continue
        wrong = {name for name in found if name.removeprefix("tritium.ml.").partition(".")[0] in FRAMEWORKS}
        assert not wrong, f"{module}, line {node.lineno}, imports {', '.join(sorted(wrong))}"


def test_what_estimators_share_is_imported_without_a_framework() -> None:
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(SHARED)}"
    subprocess.run([sys.executable, "-c", code], check=True)
