"""Imports point down, `import tritium` is light, and the public names are a list."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tritium
import tritium_compat
import tritium_flyte

PACKAGE = Path(tritium.__file__).parent
ROOTS = ("tritium", "tritium_compat", "tritium_flyte")
COMPAT = Path(tritium_compat.__file__).parent
FLYTE = Path(tritium_flyte.__file__).parent
# From the front door down: a module imports from its own layer and from those below it.
LAYERS = (
    "tritium_compat",
    "tritium_flyte",
    "",
    "integration",
    "cli",
    "compat",
    "flyte mlflow tensorboard",
    "ml",
    "predict",
    "gang",
    "checkpoint",
    "frameworks torch",
    "model",
    "data",
    "spark",
    "ui",
    "observe",
    "wire tls ship definitions events package file_system host_cache download shown errors hints accelerators aliases "
    "arguments closures triton_first",
)
# They import what is above them, as is their purpose. As texts, their names say what is shipped, not what is imported.
DOORS = ("tritium", "tritium.compat", "tritium.flyte", "tritium_compat", "tritium_flyte")
# Within gang/, a folder is a process; what is in none of them is data for all.
PROCESSES = ("driver", "coordinator", "supervisor", "rank", "control", "")
LINES, METHODS = 60, 25  # of a function without its docstring, of a class
PUBLIC = {
    "Data",
    "Exchange",
    "Gang",
    "Keras",
    "Model",
    "TensorFlow",
    "Run",
    "World",
    "errors",
    "events",
    "explain",
    "fetch",
    "http_transformer",
    "launch",
    "listen",
    "load",
    "ml",
    "profile",
    "publish",
    "submit",
    "world",
}


def depth(module: str) -> int:
    """Return the index in LAYERS of a module such as `tritium.data.spool`."""
    first, name = [*module.split("."), ""][:2]
    name = name if first == "tritium" else first
    return next(number for number, layer in enumerate(LAYERS) if name == layer or name in layer.split())


@functools.cache
def modules() -> dict[str, Path]:
    names = {
        path.relative_to(package.parent).with_suffix("").parts: path
        for package in (PACKAGE, COMPAT, FLYTE)
        for path in sorted(package.rglob("*.py"))
    }
    return {".".join(n[:-1] if n[-1] == "__init__" else n): path for n, path in names.items()}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _no_nodes_are_kept() -> Iterator[None]:
    """Free half a million objects, which every collection of garbage in a later test would look through."""
    yield
    nodes.cache_clear()


@functools.cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Return every module of Tritium's that a file names: imports, also in functions, and names given to importlib."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    known = modules()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found = [f"{node.module}.{name.name}" for name in node.names]
            found = [name if name in known else str(node.module) for name in found]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
            found = [node.value] if node.value not in DOORS else []
        else:
            continue
        yield from ((node.lineno, name) for name in found if name.split(".")[0] in ROOTS)


def test_imports_point_down() -> None:
    upward = [
        f"{module}, line {line}: {name}"
        for module, path in modules().items()
        for line, name in imported(path)
        if module not in DOORS[:3] and depth(name) < depth(module)
    ]
    assert not upward, f"from a layer above their own import: {upward}"


@pytest.mark.parametrize("package", ["tritium_compat", "tritium_flyte"])
def test_a_distribution_builds_on_what_is_public(package: str) -> None:
    """As any other package could: the front door, the errors, the events, and `tritium.integration`."""
    public = {"tritium", "tritium.compat", "tritium.errors", "tritium.events"}
    inside = [
        f"{module}, line {line}: {name}"
        for module, path in modules().items()
        if module.startswith(package)
        for line, name in imported(path)
        if name not in public and not name.startswith(("tritium.integration", package))
    ]
    assert not inside, f"imports from within Tritium: {inside}"


def test_the_page_about_integration_names_all_of_it() -> None:
    text = (PACKAGE.parents[1] / "docs" / "integration.md").read_text()
    on_page = {name for row in re.findall(r"^\| (`.*?) \|", text, re.M) for name in re.findall(r"`([\w.]+)`", row)}
    public = {name for name in modules() if name.startswith("tritium.integration")}
    for module in list(public):
        public |= {node.value for node in _all_of(modules()[module]).elts if isinstance(node, ast.Constant)}
    assert on_page == public


def _all_of(path: Path) -> ast.List:
    (value,) = (n.value for n in nodes(path) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    assert isinstance(value, ast.List)
    return value


def process(module: str) -> int:
    """Return the index in PROCESSES of a module such as `tritium.gang.rank.world`."""
    name = [*module.split("."), "", ""][2]
    return PROCESSES.index(name if name in PROCESSES else "")


def test_control_flows_from_the_driver_to_the_rank() -> None:
    """And so do imports: the driver's files know the coordinator's, those the supervisor's, those the rank's."""
    within = {name: path for name, path in modules().items() if name.startswith("tritium.gang.")}
    against = [
        f"{module}, line {line}: {name}"
        for module, path in within.items()
        for line, name in imported(path)
        if name.startswith("tritium.gang.") and process(name) < process(module)
    ]
    assert not against, f"imports against the direction: {against}"


def test_no_two_files_import_each_other() -> None:
    """Not directly, not through others, not within functions, not for type checkers only."""
    paths = modules()
    below = {name: {found for _, found in imported(path)} - {name} for name, path in paths.items()}
    while leaves := [name for name, found in below.items() if not found & below.keys()]:
        for name in leaves:
            del below[name]
    assert not below, f"in a circle, or above one: {sorted(below)}"


def test_functions_and_classes_are_small() -> None:
    for name, path in modules().items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
                assert len(methods) <= METHODS, f"{name}.{node.name} has {len(methods)} methods"
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
                assert lines <= LINES, f"{name}.{node.name} has {lines} lines: does it do one thing?"


def test_no_two_classes_have_one_name() -> None:
    """One name, one meaning; but tritium_compat has the names of the libraries that it speaks for."""
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        if path.is_relative_to(PACKAGE):
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(module)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, f"give all but one another name: {twice}"


def test_every_module_says_where_it_runs() -> None:
    where = ("driver", "supervisor", "rank", "any process", "Spark's Python worker", "engine process")
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


NEUTRAL = [
    name
    for name in modules()
    if name.startswith(("tritium.model", "tritium.predict", "tritium.checkpoint"))
    and not name.startswith("tritium.model.engines.")
]


@pytest.mark.parametrize("module", NEUTRAL)
def test_a_model_is_known_through_its_engine_alone(module: str) -> None:
    """No framework is imported outside the engines, and of the engines only what finds one by its name."""
    frameworks = {"torch", "keras", "tensorflow", "jax", "lightgbm"}
    path = modules()[module]
    found: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "__import__"):
            found += [str(given.value) for given in node.args if isinstance(given, ast.Constant)]
    engines = {name for _, name in imported(path) if name.startswith("tritium.model.engines.")}
    assert not {name for name in found if name.partition(".")[0] in frameworks}
    assert engines <= {"tritium.model.engines.registry"}


FRAMEWORKS = {path.parent.name for path in (PACKAGE / "ml").glob("*/__init__.py")}
SHARED = {name: path for name, path in modules().items() if path.parent == PACKAGE / "ml" and name != "tritium.ml"}


@pytest.mark.parametrize("module", SHARED)
def test_what_estimators_share_knows_no_framework(module: str) -> None:
    """A framework is handed in as a `Backend`; only the door `tritium.ml` names those that there are."""
    assert "torch" in FRAMEWORKS
    for node in nodes(SHARED[module]):
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
