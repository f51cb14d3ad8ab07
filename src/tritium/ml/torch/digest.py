"""Whether settings that are code or objects are the same in another session: by values, bytecode and captures (driver).

What is taken up is the same in every interpreter of one Python version, whatever its hash seed, and does not change
with line numbers, comments, names of local variables or addresses. Code of installed packages counts by its name.
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
from typing import Any, NamedTuple

import numpy as np
import torch

from tritium import ship
from tritium.ml.settings import name_of
from tritium.ml.torch.equal_weights import checksum

_SIMPLE = (type(None), bool, int, float, complex, bytes, type(...), torch.dtype, torch.device, torch.Size, np.dtype)
_RECORDS = (types.SimpleNamespace,)
_DEEPEST = 25
_MOST = 20_000  # objects; of more than so many the rest does not count
_SHORT = 200


class Parts(NamedTuple):
    """What stands for an object: three texts (or their digests) that are compared one by one."""

    value: str = ""
    """What can be compared: numbers, settings, names, tensors."""
    code: str = ""
    """Bytecode, which differs between versions of Python."""
    guess: str = ""
    """What may be another in a new session without a meaning: attributes of any objects, strings that are captured."""


def digest(thing: Any, *, exact: bool = False) -> Parts:
    """Digests of an object. `exact`: the values of a module's own tensors count, as they are no random weights."""
    return Parts(*(_sha(text)[:16] for text in _Reader(exact).parts(thing)))


def described(thing: Any) -> str:
    """A few words for a person: `MSELoss(reduction='mean')`, `partial(mse_loss, beta=2.0)`, a function's name."""
    if isinstance(thing, functools.partial):
        more = [*map(repr, thing.args), *(f"{name}={value!r}" for name, value in thing.keywords.items())]
        return f"partial({', '.join([described(thing.func), *more])})"[:_SHORT]
    if isinstance(thing, torch.nn.Module):
        settings = {k: v for k, v in vars(thing).items() if not k.startswith("_") and k != "training"}
        plain = [f"{k}={v!r}" for k, v in settings.items() if isinstance(v, bool | int | float | str)]
        return f"{name_of(thing)}({', '.join(plain)})"[:_SHORT]
    if isinstance(thing, Mapping):
        return "{" + ", ".join(f"{name!r}: {described(value)}" for name, value in thing.items())[:_SHORT] + "}"
    return "None" if thing is None else name_of(thing)


def is_own(thing: Any) -> bool:
    """Whether a function or class is the user's own code, rather than an installed package's."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "__main__")
    if module is None or module.__name__ in ("__main__", "__mp_main__"):
        return True
    return ship.is_users_own(module, ())


class _Reader:
    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._captured = False
        self._known: dict[int, tuple[Any, Parts]] = {}  # with the object, whose id stays its own so
        self._depth = 0

    def parts(self, thing: Any) -> Parts:
        """The texts of any object."""
        if isinstance(thing, _SIMPLE):
            return Parts(repr(thing))
        if isinstance(thing, str):  # one that is captured may be a path or the name of a run: it says where, not what
            return Parts("str", "", repr(str(thing))) if self._captured else Parts(repr(str(thing)))
        if id(thing) in self._known:
            return self._known[id(thing)][1]
        if self._depth > _DEEPEST or len(self._known) > _MOST:
            return Parts("more")
        self._known[id(thing)] = thing, Parts("again")  # for what refers to itself
        self._depth += 1
        try:
            found = Parts(*(text if len(text) < _SHORT else _sha(text) for text in self._parts(thing)))
        finally:
            self._depth -= 1
        self._known[id(thing)] = thing, found
        return found

    def _parts(self, thing: Any) -> Parts:
        if isinstance(thing, enum.Enum):
            return Parts(f"{_name(type(thing))}.{thing.name}")
        if isinstance(thing, list | tuple):
            return self._joined(_name(type(thing)), (self.parts(item) for item in thing))
        if isinstance(thing, set | frozenset):
            return self._joined("set", sorted(self.parts(item) for item in thing))
        if isinstance(thing, Mapping):
            return self._joined("dict", sorted(self._pair(key, value) for key, value in thing.items()))
        if isinstance(thing, np.ndarray | np.generic | torch.Tensor):
            return Parts(_numbers(thing))
        if isinstance(thing, types.ModuleType):
            return Parts(thing.__name__)
        if isinstance(thing, type):
            return self._class(thing)
        if isinstance(thing, functools.partial):
            return self._joined("partial", map(self.parts, (thing.func, thing.args, thing.keywords)))
        if isinstance(thing, types.MethodType):
            return self._joined("method", map(self.parts, (thing.__func__, thing.__self__)))
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, torch.nn.Module):
            return self._module(thing)
        if callable(thing) and hasattr(thing, "__qualname__"):
            inner = getattr(thing, "__wrapped__", None)  # functools.cache
            return Parts(_name(thing)) if inner is None else self.parts(inner)
        return self._object(thing)

    def _joined(self, kind: str, items: Iterable[Parts]) -> Parts:
        found = list(items)
        value, code, guess = ("\0".join(part) for part in zip(*found, strict=True)) if found else ("", "", "")
        return Parts(f"{kind}({value})", code, guess)

    def _pair(self, key: Any, value: Any) -> Parts:
        name = Parts(repr(key)) if isinstance(key, str) else self.parts(key)
        return self._joined("", [name, self.parts(value)])

    def _named(self, kind: str, named: Mapping[str, Any]) -> Parts:
        return self._joined(kind, (self._pair(name, named[name]) for name in sorted(named)))

    def _function(self, function: types.FunctionType) -> Parts:
        """Its code, its defaults, and what it refers to: in its closure, and among the globals of its module."""
        if not is_own(function):
            return Parts(_name(function))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        captured = {name: value for name, cell in cells for value in _content(cell)}
        used, stored = _globals(function.__code__)
        captured |= {n: function.__globals__[n] for n in used - stored if n in function.__globals__}
        defaults = {"args": function.__defaults__, "kwargs": function.__kwdefaults__}
        own = Parts("function", self._code(function.__code__))
        found = [own, self._named("defaults", defaults)]
        before, self._captured = self._captured, True
        found.append(self._named("captured", captured))
        self._captured = before
        return self._joined("", found)

    def _code(self, code: types.CodeType) -> str:
        kinds = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x2AC]
        lines = [repr(kinds)]
        for step in dis.get_instructions(code):
            if step.opname in ("EXTENDED_ARG", "NOP", "CACHE"):
                continue
            argument: Any = step.arg  # of a local variable its number, so that its name is free
            if step.opcode in dis.hasconst:
                argument = self._constant(step.argval)
            elif step.opcode in (*dis.hasname, *dis.hasjrel, *dis.hasjabs, *dis.hascompare):
                argument = step.argval
            lines.append(f"{step.opname} {argument}")
        return "\n".join(lines)

    def _constant(self, value: Any) -> str:
        return f"[{self._code(value)}]" if isinstance(value, types.CodeType) else _Reader(False).parts(value).value

    def _class(self, cls: type) -> Parts:
        if not is_own(cls):
            return Parts(_name(cls))
        members: dict[str, Any] = {}
        for name, member in vars(cls).items():
            inner = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            plain = isinstance(inner, (*_SIMPLE, str, tuple)) and not name.startswith("__")
            if isinstance(inner, types.FunctionType) or plain:
                members[name] = inner
        bases = [self.parts(base) for base in cls.__bases__]
        return self._joined(f"class {cls.__qualname__}", [*bases, self._named("members", members)])

    def _module(self, module: torch.nn.Module) -> Parts:
        settings = {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_") and name != "training" and not (callable(value) and hasattr(type(module), name))
        }
        tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        shapes = {name: (str(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
        if self._exact and not self._captured:
            weights = self._named("tensors", {name: t.detach() for name, t in tensors.items()})
        else:  # of what is only guessed a sum will do: the digest of a gigabyte takes seconds
            weights = Parts("", "", " ".join(f"{name} {_sum(t)}" for name, t in sorted(tensors.items())))
        parts = [self.parts(type(module)), self._named("settings", settings), self._named("shapes", shapes), weights]
        return self._joined("module", [*parts, self._named("children", dict(module.named_children()))])

    def _object(self, thing: Any) -> Parts:
        """Data that is known as such by its value; of the user's other objects the attributes only by a guess."""
        kind, record = self.parts(type(thing)), dataclasses.is_dataclass(thing) or isinstance(thing, _RECORDS)
        if not record and not is_own(type(thing)):
            return kind
        inner = self._named("attributes", getattr(thing, "__dict__", {}))
        if record:
            return self._joined("data", [kind, inner])
        return self._joined("object", [kind, Parts("", "", inner.value + inner.code + inner.guess)])


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{thing.__qualname__}"


def _numbers(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        if thing.layout != torch.strided or thing.device.type == "meta":
            return f"tensor {thing.dtype} {list(thing.shape)} {thing.layout}"
        kind = f"tensor {thing.dtype}"
        bits = thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        array = np.ascontiguousarray(thing)
        kind = f"array {array.dtype}"
        if array.dtype.hasobject:
            return f"{kind} {list(array.shape)}"
        bits = array.reshape(-1).view(np.uint8)
    return f"{kind} {list(thing.shape)} {hashlib.sha256(bits.data).hexdigest()}"  # not of a copy: a model may be large


def _sum(tensor: torch.Tensor) -> int | None:
    return int(checksum(tensor)) if tensor.layout == torch.strided and tensor.device.type != "meta" else None


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not bound yet
        return []


def _globals(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The names of the globals that code reads, and of those that it writes: those are no settings."""
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
