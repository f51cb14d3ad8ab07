"""Find the script, module or program that `launch` was given in place of a function (driver)."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritium.errors import BadSetting
from tritium.gang.driver.captures import uses
from tritium.gang.program import Program
from tritium.gang.settings import Gang
from tritium.hints import did_you_mean
from tritium.ship import is_installed

# Python 3.11 counts the depth of syntax trees for all threads together, and two that make one at the same time fail:
# "SystemError: AST constructor recursion depth mismatch", seen in the first launches of two threads.
_SYNTAX_TREES = threading.Lock()
LARGEST = 64 << 20
"""The most bytes of a program, which travels with every task."""


def find(name: str, args: Any, kwargs: Mapping[str, Any], gang: Gang) -> tuple[Program, Gang]:
    """Return the program of that name, and the gang with the user's own Python files that it imports in `py_files`.

    name : the path of a Python file or of an executable file; or a module: its name, or "-m" and its name.

    Raises BadSetting where there is none, and for arguments that are no strings.
    """
    if isinstance(args, str) or not isinstance(args, Sequence) or any(not isinstance(a, str) for a in args):
        raise BadSetting(f"args={args!r:.80}: the arguments of {name} are a list of strings.", setting="args")
    if kwargs:
        raise BadSetting(f"kwargs={dict(kwargs)!r:.80}: {name} takes arguments by args=[…] only.", setting="kwargs")
    if gang.on == "here":
        raise BadSetting(
            f'on="here" calls a function in this process. {name} runs in one of its own with on="driver"; for a '
            "debugger, run it without Tritium: tritium.world() works there, too.",
            setting="on",
        )
    program, files = _found(name, tuple(args))
    return program, replace(gang, py_files=(*gang.py_files, *files))


def imports(fn: Any, given: Sequence[Any], by_reference: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that tells whether the user's code imports a package, or holds objects of it.

    given        : the arguments of `fn`.
    by_reference : the user's `py_files`.
    """
    if not isinstance(fn, Program):
        return lambda package: uses(fn, package, given, by_reference)
    paths = [Path(path) for path in by_reference]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    trees = [_parsed(file.read_bytes(), str(file)) for file in files if file.suffix == ".py"]
    if fn.kind == "script":
        trees.append(_parsed(fn.content, fn.path))
    names = {name for tree in trees for name in _imports(tree)}
    return names.__contains__


def _found(name: str, args: tuple[str, ...]) -> tuple[Program, list[str]]:
    module = re.fullmatch(r"-m\s+(\S+)", name)
    path = Path(name)
    if module is None and path.is_file():
        return _file(path.resolve(), args)
    if module is not None or not (os.sep in name or name.endswith(".py")):
        module_name = module[1] if module else name
        origin = _module(module_name)
        if origin is not None:
            files = [] if is_installed(origin) else [_root(module_name, origin)]
            return Program("module", module_name, args), files
        if module is not None:
            raise BadSetting(f"There is no module {module_name!r} that can be run here: see PYTHONPATH.", setting="fn")
    beside = [file.name for file in path.parent.glob("*")] if path.parent.is_dir() else []
    raise BadSetting(
        f"There is no file {path.name!r} in {path.parent.resolve()}, and no module of that name."
        f"{did_you_mean(path.name, beside)}",
        setting="fn",
    )


def _file(path: Path, args: tuple[str, ...]) -> tuple[Program, list[str]]:
    size = path.stat().st_size
    if size > LARGEST:
        raise BadSetting(
            f"{path} has {size:,} bytes, and travels with every task: {LARGEST:,} at most. Install it on the "
            "executors, and launch a script that starts it.",
            setting="fn",
        )
    content = path.read_bytes()
    if path.suffix == ".py":
        tree = _parsed(content, str(path))
        return Program("script", str(path), args, content), sorted(_own_modules(tree, path.parent))
    if not os.access(path, os.X_OK):
        raise BadSetting(f"{path} is neither a Python file nor executable: chmod +x {path}", setting="fn")
    return Program("program", str(path), args, content), []


def _parsed(content: bytes, path: str) -> ast.Module:
    try:
        with _SYNTAX_TREES:
            return ast.parse(content, path)
    except (SyntaxError, ValueError) as error:
        raise BadSetting(f"{path} can't be run: {error}", setting="fn") from error


def _module(name: str) -> str | None:
    """Return the file of a module that can be run with `python -m`, or None."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError, AttributeError):
        return None
    return None if spec is None else spec.origin


def _root(name: str, origin: str) -> str:
    """Return the entry of `py_files` for a module: its file, or the directory of its top package."""
    parts = name.split(".")
    depth = len(parts) - (0 if os.path.basename(origin) == "__main__.py" else 1)
    return origin if depth == 0 else str(Path(origin).parents[depth - 1])


def _own_modules(tree: ast.AST, folder: Path, modules: set[str] | None = None) -> set[str]:
    """Return the files and packages beside a script that it imports, directly or through one of them."""
    modules = set() if modules is None else modules
    for name in _imports(tree):
        file, package = folder / f"{name}.py", folder / name
        if package.is_dir() and any(package.glob("*.py")) and str(package) not in modules:
            modules.add(str(package))
            for inner in package.rglob("*.py"):
                _own_modules(_parsed(inner.read_bytes(), str(inner)), folder, modules)
        elif file.is_file() and str(file) not in modules:
            modules.add(str(file))
            _own_modules(_parsed(file.read_bytes(), str(file)), folder, modules)
    return modules


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yield the top names of all absolute imports in Python code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
