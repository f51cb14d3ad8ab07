"""Hashes of settings that are code or objects, to compare a training with one of an earlier session (driver).

A function counts by its source without comments, docstrings and layout, by the plain values that it captures, and by
the user's functions that it calls. Those that these call, captured texts (a path, the name of a run) and what objects
hold are hashed apart: a difference there may mean nothing. Code of installed packages counts by its name.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import linecache
import operator
import pathlib
import re
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tritium.arguments import name_of
from tritium.closures import closed_over, globals_of, imported_captures, is_own, module_captures, nested, own_captures
from tritium.ship import is_users_own

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), np.dtype)
_BY_TEXT = (
    range,
    slice,
    re.Pattern,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    operator.itemgetter,
    operator.attrgetter,
    operator.methodcaller,
)
"""Values without attributes, whose text has all that they are."""
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
"""Objects that hold settings, as dataclasses do."""
_TABLES = ("pandas", "jaxlib", "tensorflow")
"""Packages whose arrays, series and tables are values like those of NumPy."""
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_NEAR = 1
"""A function so many calls from a setting counts like the setting itself."""
_FAR = _NEAR + 1
_DEEPEST = 25
_MOST = 20_000
"""Values beyond this number are left out, and the setting is not wholly known."""
_SHORT = 200
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_MADE_BY_EXEC = "<string>"
"""The file of the methods that dataclasses and named tuples get."""


class Code(NamedTuple):
    """What is compared of a setting."""

    exact: str
    """The hash of what counts."""
    loose: str
    """The hash of what may differ in a new session without meaning anything."""
    known: bool
    """Whether all was compared: code without source counts by the names and numbers in it alone."""


class Opened(NamedTuple):
    """An object of a framework, as the framework's backend takes it apart."""

    kind: type
    settings: Mapping[str, Any]
    """What counts."""
    weights: Mapping[str, Any] = types.MappingProxyType({})
    """Numbers that may be random."""


Opener: TypeAlias = Callable[[Any], Opened | None]
"""Takes apart an object of a framework; None for any other."""


def plain(thing: Any) -> Opened | None:
    """Return None: the opener where there is no framework."""
    return None


def code_of(thing: Any, opened: Opener = plain, *, weights: bool = False) -> Code:
    """Return the hashes of a setting with all that it refers to.

    weights : whether its weights count, as they are not random.
    """
    return _Walk(opened, weights).run(thing)


def describe(thing: Any, opened: Opener = plain) -> str:
    """Return a short text for messages: `partial(mse_loss, beta=2.0)`, `HuberLoss(delta=0.5)`, a function's name."""
    if isinstance(thing, str | None):
        return repr(thing)
    if isinstance(thing, functools.partial):
        more = [*map(repr, thing.args), *(f"{name}={value!r}" for name, value in thing.keywords.items())]
        return f"partial({', '.join([describe(thing.func, opened), *more])})"[:_SHORT]
    if isinstance(thing, Mapping):
        items = (f"{name!r}: {describe(value, opened)}" for name, value in thing.items())
        return "{" + ", ".join(items)[:_SHORT] + "}"
    if isinstance(thing, list | tuple):
        return f"[{', '.join(describe(item, opened) for item in thing)}]"[:_SHORT]
    inside = None if isinstance(thing, type) else opened(thing)
    if inside is None:
        return name_of(thing)
    settings = (f"{k}={v!r}" for k, v in inside.settings.items() if isinstance(v, bool | int | float | str))
    return f"{inside.kind.__name__}({', '.join(settings)})"[:_SHORT]


@dataclasses.dataclass
class _Hash:
    """One of the two hashes of a walk, with what went into it, so that neither depends on the other."""

    digest: Any = dataclasses.field(default_factory=hashlib.sha256)
    count: int = 0
    seen: dict[int, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    """Where an object was first; it is kept here, so that no id is used twice."""


class _Walk:
    """A walk over what a setting refers to, the nearest functions first."""

    def __init__(self, opened: Opener, weights: bool) -> None:
        self._opened, self._weights = opened, weights
        self._exact, self._loose = _Hash(), _Hash()
        self._known = True
        self._functions: deque[tuple[str, types.FunctionType, int]] = deque()

    def run(self, thing: Any) -> Code:
        self._add("", thing, 0)
        while self._functions:
            self._function(*self._functions.popleft())
        exact, loose = (part.digest.hexdigest()[:16] for part in (self._exact, self._loose))
        return Code(exact, loose, self._known)

    def _hash(self, calls: int) -> _Hash:
        return self._exact if calls <= _NEAR else self._loose

    def _note(self, path: str, text: str, calls: int) -> None:
        self._hash(calls).digest.update(f"{path}: {text}\n".encode())

    def _add(self, path: str, thing: Any, calls: int, captured: bool = False) -> None:
        """Add a value. `calls`: from the setting to where it is; `captured`: by a function there."""
        part = self._hash(calls)
        part.count += 1
        if isinstance(thing, str | pathlib.PurePath) and captured:
            self._note(path, repr(thing), _FAR)
        elif isinstance(thing, enum.Enum):
            self._note(path, f"{_name(type(thing))}.{thing.name}", calls)
            self._add(f"{path}/value", thing.value, calls)
        elif isinstance(thing, (*_PLAIN, *_BY_TEXT, pathlib.PurePath)):
            self._note(path, repr(thing), calls)
        elif path.count("/") > _DEEPEST or part.count > _MOST:
            self._note(path, "more", calls)
            self._known = self._known and part is self._loose
        elif isinstance(thing, list | tuple):
            self._note(path, f"{_name(type(thing))} of {len(thing)}", calls)
            for place, item in enumerate(thing):
                self._add(f"{path}/{place}", item, calls, captured)
        elif isinstance(thing, Mapping):
            self._note(path, f"dict of {len(thing)}", calls)
            for key, item in sorted(thing.items(), key=lambda pair: _key(pair[0])):
                self._add(f"{path}/{_key(key)}", item, calls, captured)
        elif isinstance(thing, set | frozenset):
            self._note(path, f"set of {sorted(map(_key, thing))}", calls)
        elif isinstance(thing, np.ndarray | np.generic):
            self._array(path, np.asarray(thing), calls)
        elif isinstance(thing, functools.partial | functools.partialmethod):
            self._add(f"{path}/partial", [thing.func, thing.args, thing.keywords], calls, captured)
        elif isinstance(thing, types.ModuleType):
            self._note(path, "own module" if is_users_own(thing, ()) else thing.__name__, calls)
        elif id(thing) in part.seen:
            self._note(path, f"again {part.seen[id(thing)][0]}", calls)
        else:
            part.seen[id(thing)] = path, thing
            self._add_once(path, thing, calls, captured)

    def _add_once(self, path: str, thing: Any, calls: int, captured: bool) -> None:
        if isinstance(thing, types.FunctionType):
            self._functions.append((path, thing, calls + captured))
        elif isinstance(thing, types.MethodType):
            self._add(f"{path}/function", thing.__func__, calls, captured)
            self._add(f"{path}/self", thing.__self__, calls, captured)
        elif isinstance(thing, type):
            self._class(path, thing, calls + captured)
        elif (inside := self._opened(thing)) is not None:
            self._add(f"{path}/class", inside.kind, calls, captured)
            self._add(f"{path}/settings", inside.settings, calls)
            self._add(f"{path}/weights", inside.weights, calls if self._weights and not captured else _FAR)
        elif callable(thing) and hasattr(thing, "__qualname__"):
            cached = getattr(thing, "__wrapped__", None)  # Of functools.cache.
            if cached is None:
                self._note(path, _name(thing), calls + captured)
            else:
                self._add(f"{path}/function", cached, calls, captured)
        else:
            self._add(f"{path}/class", type(thing), calls, captured)
            self._object(path, thing, calls, captured)

    def _object(self, path: str, thing: Any, calls: int, captured: bool) -> None:
        """Add what an object holds. That of Python's own, such as a logger with all its handlers, is left out."""
        record = dataclasses.is_dataclass(thing) or isinstance(thing, _RECORDS)
        package = str(type(thing).__module__).partition(".")[0]
        if package in _TABLES and hasattr(type(thing), "__array__"):
            self._array(path, np.asarray(thing), calls)
        elif record or package not in sys.stdlib_module_names or is_own(type(thing)):
            self._add(f"{path}/attributes", _attributes(thing), calls if record else _FAR, captured)

    def _array(self, path: str, array: np.ndarray[Any, Any], calls: int) -> None:
        self._note(path, f"array {array.dtype} {list(array.shape)}", calls)
        if array.dtype.hasobject:
            self._add(f"{path}/items", array.tolist(), calls)
        else:
            self._note(path, str(zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)), calls)

    def _function(self, path: str, function: types.FunctionType, calls: int) -> None:
        if not is_own(function):
            self._note(path, _name(function), calls)
            if "<locals>" in function.__qualname__:  # A function of the package has made it, as focal_loss(gamma=2).
                for capture in closed_over(function):
                    self._add(f"{path}/{capture.name}", capture.value, calls, captured=True)
            return
        source = source_of(function)
        self._known = self._known and source is not None
        self._note(path, _outline(function.__code__) if source is None else source, calls)
        counters = globals_of(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL")  # They are no settings.
        for capture in sorted(own_captures(function), key=lambda capture: capture.name):
            if capture.name not in counters:
                self._add(f"{path}/{capture.name}", capture.value, calls, captured=True)
        for capture in module_captures(function):
            self._add(f"{path}/{capture.name}", capture.value, calls, captured=True)
        for capture in imported_captures(function):  # Not all of these modules are imported yet.
            self._add(f"{path}/{capture.name}", capture.value, _FAR, captured=True)

    def _class(self, path: str, cls: type, calls: int) -> None:
        if not is_own(cls):
            self._note(path, _name(cls), calls)
            return
        self._note(path, f"class {cls.__qualname__} of {len(cls.__bases__)}", calls)
        for place, base in enumerate(cls.__bases__):
            self._add(f"{path}/base {place}", base, calls)
        for name, member in sorted(vars(cls).items()):
            cached = member.func if isinstance(member, functools.cached_property) else None
            inner = cached or getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if isinstance(inner, types.FunctionType):
                if inner.__code__.co_filename != _MADE_BY_EXEC or not name.startswith("__"):
                    self._add(f"{path}/{name}", inner, calls)
            elif not name.startswith("__") and not isinstance(inner, _SLOTS):
                self._add(f"{path}/{name}", inner, calls)


# ---- source


def source_of(function: types.FunctionType) -> str | None:
    """Return a function's source without comments, docstrings and layout; None where there is none, or several."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    nodes = _functions_in(text).get((code.co_firstlineno, code.co_name), [])
    if len(nodes) > 1 and hasattr(code, "co_positions"):  # Several lambdas are in a line. Python has this since 3.11.
        starts = {(line, column) for line, _, column, _ in code.co_positions()}
        nodes = [node for node in nodes if isinstance(node, ast.Lambda) and _start(node.body) in starts]
    return ast.unparse(nodes[0]) if len(nodes) == 1 else None


@functools.lru_cache(maxsize=32)
def _functions_in(text: str) -> Mapping[tuple[int, str], list[ast.AST]]:
    """Return the functions of a file by their first line and name, without their docstrings."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    functions: dict[tuple[int, str], list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (*_FUNCTIONS[:2], ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, _FUNCTIONS):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            functions.setdefault((line, getattr(node, "name", "<lambda>")), []).append(node)
    return functions


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _outline(code: types.CodeType) -> str:
    """Return the names and numbers in a function without source, and in those within it."""
    return repr([code.co_names, _numbers(code.co_consts), *map(_outline, nested(code))])


def _numbers(constants: Iterable[Any]) -> list[Any]:
    return [
        _numbers(value) if isinstance(value, tuple) else value
        for value in constants
        if isinstance(value, int | float | complex | tuple)
    ]


# ---- texts of values


def words_of(words: Any) -> str:
    """Return a vocabulary as a short text, another one for other words."""
    return f"{len(words)} words ({hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:8]})"


def _key(value: Any) -> str:
    """Return a key, or an element of a set, as a text that does not contain an address."""
    return repr(value) if isinstance(value, (*_PLAIN, tuple)) else name_of(value)


def _name(thing: Any) -> str:
    """Return a name with that of its package; a file of the user's may be called or imported otherwise."""
    return str(thing.__qualname__) if is_own(thing) else f"{thing.__module__}.{thing.__qualname__}"


def _attributes(thing: Any) -> dict[str, Any]:
    """Return an object's attributes, those in slots as well."""
    slots = [name for kind in type(thing).__mro__ for name, slot in vars(kind).items() if isinstance(slot, _SLOTS[0])]
    return {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})
