"""Code fragments that messages and pages advise, and whether what they name exists."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tritium"
COMPAT = ROOT / "packages" / "tritium-compat"
FLYTE = ROOT / "packages" / "tritium-flyte"
SOURCES = (
    *sorted(SOURCE.rglob("*.py")),
    *sorted(COMPAT.rglob("src/**/*.py")),
    *sorted(FLYTE.rglob("src/**/*.py")),
)
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    # tests/unit/test_imports.py compares the one about integration with what it describes, for which Keras is imported.
    *sorted(page for page in ROOT.glob("docs/*.md") if page.name != "integration.md"),
    *sorted(ROOT.glob("docs/reference/*.md")),
    *sorted(ROOT.glob("docs/tasks/*.md")),
    *sorted(ROOT.glob("docs/frameworks/*.md")),
    *sorted(ROOT.glob("docs/migrate/*.md")),
)
# Whose texts are a protocol's, for no one to read, or files of a user's project.
PROTOCOLS = (
    SOURCE / "gang" / "supervisor" / "pmi.py",
    SOURCE / "cli" / "new.py",
    FLYTE / "src" / "tritium_flyte" / "driver" / "report.py",
)
HOLE = "…"  # placeholder for a value that is known only when the message is made

ROOTS = (SOURCE, COMPAT / "src", FLYTE / "src")

# --- the texts


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """Return (file:line, text) of the package's texts with a space but docstrings: messages, settings' meanings."""
    return tuple(
        (f"{file.relative_to(next(root for root in ROOTS if file.is_relative_to(root)))}:{line}", text)
        for file in SOURCES
        if file not in PROTOCOLS
        for line, text in _texts(ast.parse(file.read_text()))
        if " " in text
    )


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
            silent |= {id(part) for part in node.values}
            yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.lineno, node.value


@cache
def in_pages() -> tuple[tuple[str, str], ...]:
    """Return (page:line, text) of everything in backticks outside the pages' code blocks."""
    found = []
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", lambda m: re.sub(r"[^\n]", "", m[0]), page.read_text(), flags=re.M | re.S)
        for match in re.finditer(r"`([^`\n]+)`", prose):
            line = prose[: match.start()].count("\n") + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", match[1]))
    return tuple(found)


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """Yield (line, code) of the page's blocks in one of these languages."""
    text = page.read_text()
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```", text, re.M | re.S):
        if match[2] in languages:
            indent = len(match[1])
            yield text[: match.start()].count("\n") + 1, "".join(x[indent:] for x in match[3].splitlines(True))


# --- the fragments

KINDS: dict[str, str] = {
    "setting": r"(?<![\w.{-])([a-z_]\w*)=(?![=\s]|$)",
    "name": r"(?<![\w./`-])((?:tr|tritium|world|model|estimator|torch|df|F|error)(?:\.[A-Za-z_]\w*)+)",
    "spark": r"(?<![\w./-])(spark(?:\.[A-Za-z]\w*)+)",
    "call": r"(?<![\w.])([A-Za-z_][\w.]*)\((?!s\))",
    "method": r"(?<=[)\]])\.([A-Za-z_]\w*)\(",
    "class": r"(?<![\w.…])([A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+)\b",
    "env": r"(?<![\w.])([A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9])(?![\w(])",
    "extra": r"(?:\btritium|[\s\"']\.)\[([\w,]+)\]",
    "command": r"(?:`|^)tritium ([a-z]\w*)",
    "target": r"(?:`|^)make ((?:[a-z]+ ?)+)",
}


@cache
def fragments(texts: tuple[tuple[str, str], ...]) -> dict[str, dict[str, list[str]]]:
    """Return kind → fragment → its places."""
    found: dict[str, dict[str, list[str]]] = {kind: {} for kind in KINDS}
    for where, text in texts:
        for kind, pattern in KINDS.items():
            for fragment in re.findall(pattern, text):
                found[kind].setdefault(fragment.strip(), []).append(where)
    return found


# --- whether they exist


@cache
def settings() -> frozenset[str]:
    """Return every field of the settings' dataclasses, and every parameter of the public API."""
    import tritium as tr

    classes = [tr.Gang, tr.Data, tr.ml.TorchSettings, tr.ml.EarlyStopping]
    found = {field.name for cls in classes for field in dataclasses.fields(cls)}
    for owner in public():
        members = [owner]
        if inspect.isclass(owner):
            members += [m for name, m in inspect.getmembers(owner) if callable(m) and not name.startswith("_")]
        for member in members:
            found |= parameters(member)
    return frozenset(found)


@cache
def public() -> tuple[Any, ...]:
    """Return the public API: the names of `tritium`, and the classes of what they return."""
    import tritium as tr
    from tritium.checkpoint.checkpoints import Checkpoints
    from tritium.checkpoint.store import Store
    from tritium.data.shard import Shard
    from tritium.model.signature import Input, Output, Signature

    front = [getattr(tr, name) for name in tr.__all__ if name not in ("errors", "events", "ml")]
    return (*front, *(getattr(tr.ml, n) for n in tr.ml.__all__), Shard, Checkpoints, Store, Input, Output, Signature)


def parameters(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def exists(dotted: str, roots: Callable[[str], list[Any]]) -> bool:
    """Return whether an object that the first name may stand for has these attributes, one below the other."""
    first, *rest = dotted.split(".")
    return any(_leads(root, rest) for root in roots(first))


def _leads(value: Any, names: list[str]) -> bool:
    for name in names:
        value = _returned(value)
        if value is Any:
            return True
        if inspect.isclass(value) and name in _instance_fields(value):
            value = Any  # set in __init__: its class is unknown
            continue
        try:
            value = inspect.getattr_static(value, name) if inspect.isclass(value) else getattr(value, name)
        except AttributeError:
            try:
                value = importlib.import_module(f"{value.__name__}.{name}")
            except (ImportError, AttributeError):
                return False
    return True


def _returned(value: Any) -> Any:
    """Return the class of a property's value (Any without an annotation), or any other value itself."""
    if not isinstance(value, property | cached_property):
        return value
    function = value.fget if isinstance(value, property) else value.func
    assert function is not None
    returned = inspect.signature(function).return_annotation
    if inspect.isclass(returned):
        return returned
    named = [owner for owner in public() if getattr(owner, "__name__", None) == returned]
    return named[0] if named else function.__globals__.get(returned, Any)


@cache
def _instance_fields(cls: type) -> frozenset[str]:
    found = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for base in cls.__mro__[:-1]:
        found |= set(vars(base).get("__annotations__", {}))
        if base.__module__.startswith("tritium"):
            found |= set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(base)))
    return frozenset(found)


@cache
def roots(name: str) -> list[Any]:
    """Return the objects that this name stands for in a message or a page."""
    import numpy as np
    import pandas as pd
    import torch
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql import functions as F

    import tritium as tr
    from tritium.data.epochs import Epoch
    from tritium.data.shard import Shard

    known: dict[str, list[Any]] = {
        "tr": [tr],
        "tritium": [tr],
        "world": [tr.World],
        "run": [tr.Run],
        "shard": [Shard],
        "epoch": [Epoch],
        "model": [tr.ml.TorchModel, tr.Model, torch.nn.Module],
        "module": [torch.nn.Module],
        "estimator": [tr.ml.TorchEstimator],
        "torch": [torch],
        "state": [tr.ml.TrainState],
        "optimizer": [torch.optim.Optimizer],
        "df": [DataFrame, pd.DataFrame],
        "col": [Column],
        "DataFrame": [DataFrame],
        "spark": [SparkSession],
        "F": [F],
        "np": [np],
        "error": [Any],
    }
    if name in known:
        return known[name]
    found = [owner for owner in public() if getattr(owner, "__name__", None) == name]
    if name in sys.stdlib_module_names:
        return [importlib.import_module(name)]
    homes: list[Any] = [
        builtins,
        functools,
        F,
        torch.Tensor,
        torch.nn,
        torch.optim.lr_scheduler,
        DataFrame,
        pd.DataFrame,
        SparkSession,
        *public(),
    ]
    return found or [getattr(home, name) for home in homes if hasattr(home, name)]


def is_class(name: str) -> bool:
    """Return whether Tritium, Python, Spark or torch has a class of this name in the expected place."""
    homes = """tritium.errors tritium.events tritium.ml builtins pyspark pyspark.sql pyspark.errors pyspark.ml
        pyspark.ml.feature pyspark.ml.tuning pyspark.ml.evaluation torch.nn torch.nn.parallel torch.utils.data
        torch.optim.lr_scheduler"""
    return any(inspect.isclass(getattr(importlib.import_module(home), name, None)) for home in homes.split())


@cache
def shims(package: Path) -> frozenset[str]:
    """Return the names of functions, classes, arguments and attributes that `tritium.compat` or another one defines."""
    found: set[str] = set()
    for path in package.rglob("src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return frozenset(found)


def is_shims(fragment: str, places: list[str]) -> bool:
    """Return whether messages of `tritium.compat` and pages about migration alone have a name that it defines.

    So, too, of `tritium.flyte`.
    """
    homes = {
        COMPAT: ("tritium_compat/", "docs/migrate/"),
        FLYTE: ("tritium_flyte/", "docs/flyte", "docs/migrate/horovod-flyte.md"),
    }
    return any(
        all(place.startswith(where) for place in places) and fragment.rpartition(".")[2] in shims(package)
        for package, where in homes.items()
    )


@cache
def extras() -> frozenset[str]:
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return frozenset(re.findall(r"^([\w-]+) = ", text, re.M))


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))


@cache
def commands() -> frozenset[str]:
    from tritium.cli import main

    of_others = (COMPAT / "pyproject.toml").read_text().partition('"tritium.commands"]')[2].partition("[")[0]
    return frozenset((*main.commands, *re.findall(r"^([\w-]+) = ", of_others, re.M)))


@cache
def code() -> str:
    """Return all code of the package and its scripts, in which our environment variables are read."""
    files = [*SOURCES, *ROOT.glob("scripts/*.*"), ROOT / "Makefile", *ROOT.glob("tests/*.py")]
    return "\n".join(file.read_text() for file in files)


def config(fragment: str) -> bool:
    """Return whether `spark.…` is a key of Spark's configuration (checked in tests/spark), not a method."""
    return not exists(fragment, roots)


def callables(dotted: str) -> list[Any]:
    """Return the callables of this name in a page."""
    first, *rest = dotted.split(".")
    found = []
    for value in roots(first):
        for name in rest:
            value = getattr(value, name, None)
        if callable(value):
            found.append(value)
    return found[:1]


def keywords(function: Any) -> set[str]:
    """Return the keywords that `function` takes, those of `**settings` included; empty where they are unknown."""
    import tritium as tr

    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set()
    names = {name for name, parameter in taken.items() if parameter.kind is not parameter.VAR_KEYWORD}
    if len(names) == len(taken):
        return names
    gang = {field.name for field in dataclasses.fields(tr.Gang)}
    training = {field.name for field in dataclasses.fields(tr.ml.TorchSettings)}
    if function is tr.launch:
        return names | gang
    if function in (tr.ml.TorchEstimator, tr.ml.fit):
        return names | gang | training
    if function is tr.ml.TorchModel.setParams:
        params = {**vars(tr.ml.TorchModel.__mro__[1]), **vars(tr.ml.TorchModel)}
        return {name for name, one in params.items() if hasattr(one, "doc")} | {"outputCols"}
    return set()
