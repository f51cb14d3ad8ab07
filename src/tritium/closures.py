"""The objects that a function refers to: by closure, globals, defaults, attributes of its object (any process).

The driver looks there for objects that can't be pickled, and for changes that make a function another one in a later
session.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

from tritium import ship


@dataclass(frozen=True)
class Capture:
    """One object that a function refers to, and that is pickled with it."""

    name: str
    """As the user wrote it: `df`, `self.session`, `args[0]`."""
    value: Any
    owner: str
    """The function that captures it, `train()`; "" for arguments."""

    def __str__(self) -> str:
        return f"{self.name!r} ({described(self.value)})" + (f", which {self.owner} captures" if self.owner else "")


def own_captures(fn: Any, by_reference: Sequence[str] = ()) -> Iterator[Capture]:
    """Yield the objects that a function, method, partial or callable object refers to; none where ranks import it.

    by_reference : directories whose modules the ranks import.
    """
    name = title(fn)
    if isinstance(fn, functools.partial):
        yield Capture(bare(fn.func), fn.func, name)
        yield from (Capture(f"argument {i}", value, name) for i, value in enumerate(fn.args))
        yield from (Capture(key, value, name) for key, value in fn.keywords.items())
    elif isinstance(fn, MethodType):
        if not isinstance(fn.__self__, (type, ModuleType)):
            yield from (Capture(f"self.{key}", value, name) for key, value in attributes(fn.__self__))
        yield Capture(bare(fn.__func__), fn.__func__, name)
    elif isinstance(fn, FunctionType):
        if goes_by_value(fn, by_reference):
            yield from _of_function(fn, name)
    elif not isinstance(fn, type):  # Only objects with __call__ are left.
        yield from (Capture(f"self.{key}", value, name) for key, value in attributes(fn))
        if isinstance(call := vars(type(fn)).get("__call__"), FunctionType):
            yield Capture("__call__", call, name)


def closed_over(fn: FunctionType) -> Iterator[Capture]:
    """Yield what a function takes from those around it."""
    for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield Capture(variable, cell.cell_contents, title(fn))
        except ValueError:  # The variable is not set yet.
            continue


def _of_function(fn: FunctionType, name: str) -> Iterator[Capture]:
    yield from closed_over(fn)
    for variable in globals_of(fn.__code__):
        if variable in fn.__globals__:
            yield Capture(variable, fn.__globals__[variable], name)
    arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    defaults = fn.__defaults__ or ()
    by_name = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    for argument, value in {**by_name, **(fn.__kwdefaults__ or {})}.items():
        yield Capture(argument, value, name)
    if wrapped := getattr(fn, "__wrapped__", None):
        yield Capture(bare(wrapped), wrapped, name)


def module_captures(fn: FunctionType) -> Iterator[Capture]:
    """Yield what a function takes from the user's modules, such as `helpers.loss` or `project.settings.RATE`."""
    owner = title(fn)
    modules = {capture.name: capture.value for capture in _of_function(fn, owner)}
    for code in _with_nested(fn.__code__):
        name, value = "", None
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and _is_own_module(value):
                name, value = f"{name}.{step.argval}", getattr(value, step.argval, None)
                if not isinstance(value, ModuleType):
                    yield Capture(name, value, owner)
            else:
                name = str(step.argval)
                value = modules.get(name) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") else None


def imported_captures(fn: FunctionType) -> Iterator[Capture]:
    """Yield what a function may take from the user's modules that it imports itself, if they are imported by now."""
    for code in _with_nested(fn.__code__):
        imports = [step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
        for module in (sys.modules.get(name) for name in imports):
            if _is_own_module(module):
                names = sorted(name for name in code.co_names if name in vars(module))
                yield from (Capture(f"{module.__name__}.{name}", vars(module)[name], title(fn)) for name in names)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in nested(code):
        yield from _with_nested(inner)


def _is_own_module(value: Any) -> TypeGuard[ModuleType]:
    return isinstance(value, ModuleType) and ship.is_users_own(value, ())


def is_code(value: Any) -> bool:
    """Return whether `value` is a function, or a method or partial of one."""
    return isinstance(value, (FunctionType, MethodType, functools.partial))


def globals_of(code: CodeType, *operations: str) -> list[str]:
    """List the globals that the code and code nested in it load, or use by these operations of dis."""
    operations = operations or ("LOAD_GLOBAL", "LOAD_NAME")
    names = [i.argval for i in dis.get_instructions(code) if i.opname in operations]
    for inner in nested(code):
        names += globals_of(inner, *operations)
    return list(dict.fromkeys(names))


def nested(code: CodeType) -> list[CodeType]:
    """List the code objects of the functions and classes that are defined in the code."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def is_own(thing: Any, by_reference: Sequence[str] = ()) -> bool:
    """Return whether a function or class is the user's own code, rather than an installed package's."""
    name = getattr(thing, "__module__", None) or "__main__"
    module = sys.modules.get(name)
    if module is None or name in ("__main__", "__mp_main__"):
        return True
    return ship.is_users_own(module, tuple(os.path.abspath(path) for path in by_reference))


def goes_by_value(fn: FunctionType, by_reference: Sequence[str] = ()) -> bool:
    """Tell whether a function is pickled by value, with its code and globals; otherwise the ranks import it."""
    return "<" in fn.__qualname__ or is_own(fn, by_reference)


def attributes(value: Any) -> list[tuple[str, Any]]:
    """List the attributes that are pickled with an object; none for a class that defines its own pickling."""
    pickling_methods = ("__getstate__", "__reduce__", "__reduce_ex__")
    if any(name in vars(kind) for kind in type(value).__mro__ if kind is not object for name in pickling_methods):
        return []
    values = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in values and hasattr(value, slot):
                values[slot] = getattr(value, slot)
    return list(values.items())


def title(fn: Any) -> str:
    """Return a function's name for messages: `train()`, `the lambda`."""
    name = bare(fn)
    return "the lambda" if name == "<lambda>" else f"{name}()"


def bare(fn: Any) -> str:
    """Return a function's name without those of the functions around it."""
    if isinstance(fn, functools.partial):
        return bare(fn.func)
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return str(name).rpartition("<locals>.")[2]


def described(value: Any) -> str:
    """Return the class of a value with its article: `a torch.nn.modules.linear.Linear`."""
    kind = type(value)
    home = kind.__module__
    short = kind.__qualname__ if home == "builtins" or home.startswith("pyspark.") else f"{home}.{kind.__qualname__}"
    return f"{'an' if short[0] in 'AEIO' else 'a'} {short}"
