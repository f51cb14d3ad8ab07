"""Digests of settings that are code or objects, by values, bytecode and captures, to compare sessions (driver).

A digest is the same in every interpreter of one Python version, whatever its hash seed, and does not depend on line
numbers, comments, names of local variables or addresses. Code of installed packages is digested by its name.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tritium import ship
from tritium.arguments import name_of

_SIMPLE = (type(None), bool, int, float, complex, bytes, type(...), np.dtype)
_RECORDS = (types.SimpleNamespace,)
_DEEPEST = 25
_MOST = 20_000  # objects; those beyond are left out
SHORT = 200


class Parts(NamedTuple):
    """The three texts (or their digests) of an object, which are compared one by one."""

    value: str = ""
    """What can be compared reliably: numbers, settings, names, arrays."""
    code: str = ""
    """Bytecode, which differs between versions of Python."""
    guess: str = ""
    """What may differ in a new session without meaning anything: attributes of any objects, captured strings."""


def is_own(thing: Any) -> bool:
    """Return whether a function or class is the user's own code, rather than an installed package's."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "__main__")
    if module is None or module.__name__ in ("__main__", "__mp_main__"):
        return True
    return ship.is_users_own(module, ())


class CodeDigest:
    """A digest of an object with all that it holds and refers to. A framework adds its own types."""

    simple: ClassVar[tuple[type, ...]] = _SIMPLE
    """Types whose `repr` identifies the value, in any interpreter."""

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.captured = False
        self._known: dict[int, tuple[Any, Parts]] = {}  # the object is kept so that its id is not reused
        self._depth = 0

    @classmethod
    def of(cls, thing: Any, *, exact: bool = False) -> Parts:
        """Return the digests of an object. `exact`: compare a model's weights by value, as they are not random."""
        return Parts(*(_sha(text)[:16] for text in cls(exact).parts(thing)))

    @classmethod
    def describe(cls, thing: Any) -> str:
        """Return a short text for messages: `partial(mse_loss, beta=2.0)`, a function's name."""
        if isinstance(thing, functools.partial):
            more = [*map(repr, thing.args), *(f"{name}={value!r}" for name, value in thing.keywords.items())]
            return f"partial({', '.join([cls.describe(thing.func), *more])})"[:SHORT]
        if isinstance(thing, Mapping):
            return "{" + ", ".join(f"{name!r}: {cls.describe(value)}" for name, value in thing.items())[:SHORT] + "}"
        return "None" if thing is None else name_of(thing)

    def of_framework(self, thing: Any) -> Parts | None:
        """Return the texts of an object of the framework (a model, a tensor); None for any other."""
        return None

    def parts(self, thing: Any) -> Parts:
        """Return the texts of any object."""
        if isinstance(thing, self.simple):
            return Parts(repr(thing))
        if isinstance(thing, str):  # a captured one may be a path or a run's name, not part of what is trained
            return Parts("str", "", repr(str(thing))) if self.captured else Parts(repr(str(thing)))
        if id(thing) in self._known:
            return self._known[id(thing)][1]
        if self._depth > _DEEPEST or len(self._known) > _MOST:
            return Parts("more")
        self._known[id(thing)] = thing, Parts("again")  # for an object that refers to itself
        self._depth += 1
        try:
            found = Parts(*(text if len(text) < SHORT else _sha(text) for text in self._parts(thing)))
        finally:
            self._depth -= 1
        self._known[id(thing)] = thing, found
        return found

    def _parts(self, thing: Any) -> Parts:
        if isinstance(thing, enum.Enum):
            return Parts(f"{_name(type(thing))}.{thing.name}")
        if isinstance(thing, list | tuple):
            return self.joined(_name(type(thing)), (self.parts(item) for item in thing))
        if isinstance(thing, set | frozenset):
            return self.joined("set", sorted(self.parts(item) for item in thing))
        if isinstance(thing, Mapping):
            return self.joined("dict", sorted(self._pair(key, value) for key, value in thing.items()))
        if isinstance(thing, np.ndarray | np.generic):
            return Parts(_array(thing))
        if isinstance(thing, types.ModuleType):
            return Parts(thing.__name__)
        if isinstance(thing, type):
            return self._class(thing)
        if isinstance(thing, functools.partial):
            return self.joined("partial", map(self.parts, (thing.func, thing.args, thing.keywords)))
        if isinstance(thing, types.MethodType):
            return self.joined("method", map(self.parts, (thing.__func__, thing.__self__)))
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if (found := self.of_framework(thing)) is not None:
            return found
        if callable(thing) and hasattr(thing, "__qualname__"):
            inner = getattr(thing, "__wrapped__", None)  # functools.cache
            return Parts(_name(thing)) if inner is None else self.parts(inner)
        return self._object(thing)

    def joined(self, kind: str, items: Iterable[Parts]) -> Parts:
        """Return the texts of several parts as those of one object."""
        found = list(items)
        value, code, guess = ("\0".join(part) for part in zip(*found, strict=True)) if found else ("", "", "")
        return Parts(f"{kind}({value})", code, guess)

    def _pair(self, key: Any, value: Any) -> Parts:
        name = Parts(repr(key)) if isinstance(key, str) else self.parts(key)
        return self.joined("", [name, self.parts(value)])

    def named(self, kind: str, named: Mapping[str, Any]) -> Parts:
        """Return the texts of named objects as those of one object."""
        return self.joined(kind, (self._pair(name, named[name]) for name in sorted(named)))

    def _function(self, function: types.FunctionType) -> Parts:
        """Return the texts of a function's code, its defaults, and what it refers to in its closure and its globals."""
        if not is_own(function):
            return Parts(_name(function))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        captured = {name: value for name, cell in cells for value in _content(cell)}
        used, stored = _globals(function.__code__)
        captured |= {n: function.__globals__[n] for n in used - stored if n in function.__globals__}
        defaults = {"args": function.__defaults__, "kwargs": function.__kwdefaults__}
        own = Parts("function", self._code(function.__code__))
        found = [own, self.named("defaults", defaults)]
        before, self.captured = self.captured, True
        found.append(self.named("captured", captured))
        self.captured = before
        return self.joined("", found)

    def _code(self, code: types.CodeType) -> str:
        kinds = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x2AC]
        lines = [repr(kinds)]
        for step in dis.get_instructions(code):
            if step.opname in ("EXTENDED_ARG", "NOP", "CACHE"):
                continue
            argument: Any = step.arg  # a local variable's number, so that its name does not matter
            if step.opcode in dis.hasconst:
                argument = self._constant(step.argval)
            elif step.opcode in (*dis.hasname, *dis.hasjrel, *dis.hasjabs, *dis.hascompare):
                argument = step.argval
            lines.append(f"{step.opname} {argument}")
        return "\n".join(lines)

    def _constant(self, value: Any) -> str:
        return f"[{self._code(value)}]" if isinstance(value, types.CodeType) else type(self)().parts(value).value

    def _class(self, cls: type) -> Parts:
        if not is_own(cls):
            return Parts(_name(cls))
        members: dict[str, Any] = {}
        for name, member in vars(cls).items():
            inner = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            plain = isinstance(inner, (*self.simple, str, tuple)) and not name.startswith("__")
            if isinstance(inner, types.FunctionType) or plain:
                members[name] = inner
        bases = [self.parts(base) for base in cls.__bases__]
        return self.joined(f"class {cls.__qualname__}", [*bases, self.named("members", members)])

    def _object(self, thing: Any) -> Parts:
        """Return the texts of an object: attributes of data classes by value, of the user's other objects as guess."""
        kind, record = self.parts(type(thing)), dataclasses.is_dataclass(thing) or isinstance(thing, _RECORDS)
        if not record and not is_own(type(thing)):
            return kind
        inner = self.named("attributes", getattr(thing, "__dict__", {}))
        if record:
            return self.joined("data", [kind, inner])
        return self.joined("object", [kind, Parts("", "", inner.value + inner.code + inner.guess)])


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{thing.__qualname__}"


def _array(thing: Any) -> str:
    array = np.ascontiguousarray(thing)
    kind = f"array {array.dtype}"
    if array.dtype.hasobject:
        return f"{kind} {list(array.shape)}"
    bits = array.reshape(-1).view(np.uint8)
    return f"{kind} {list(thing.shape)} {hashlib.sha256(bits.data).hexdigest()}"


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not bound yet
        return []


def _globals(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names of the globals that code reads, and of those that it writes, which are not settings."""
    read, written = set[str](), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, stored = _globals(constant)
            read, written = read | inner, written | stored
    return read, written


def words_of(words: Any) -> str:
    """Return a vocabulary as a short text, another one for other words."""
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]
    return f"{len(words)} words ({digest})"
