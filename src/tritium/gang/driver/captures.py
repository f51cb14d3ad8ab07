"""Find what is pickled along with the user's function (driver).

"Captures" are the objects that are pickled with a function: variables of the functions around it, globals that its code
names (also through other functions of the user's), default values, attributes of the object it is a method of, and
its arguments.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tritium import ship

SPARK = {
    "SparkSession": "Spark lives on the driver only: do its work before the launch, and pass a DataFrame as data=.",
    "SparkContext": "Spark lives on the driver only: do its work before the launch, and pass a DataFrame as data=.",
    "DataFrame": 'Pass it as data={"train": df}; a rank reads its rows with tritium.world().shard("train").',
    "RDD": 'Make a DataFrame of it and pass that as data={"train": df}; ranks read tritium.world().shard("train").',
    "Broadcast": "Pass its value itself: args=(broadcast.value,).",
    "Accumulator": "What a rank adds to it would never reach the driver: return the number from the function.",
    "UDF": "Only Spark can call it: pass the function that it is made of.",
    "JVM": "It is in Spark's JVM, which the driver alone has: use it before the launch, and pass what it gives.",
}
"""Class of Spark's → what to do instead. "UDF": a function that `udf` has made. "JVM": what holds an object of Java."""
_ITEMS = 1000  # items of a container that are searched
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, range, slice)


@dataclass(frozen=True)
class Capture:
    """One object that is pickled with the function."""

    name: str  # as the user wrote it: df, self.session, args[0]
    value: Any
    owner: str  # the function that captures it: train(), or "" for arguments

    def __str__(self) -> str:
        return f"{self.name!r} ({described(self.value)})" + (f", which {self.owner} captures" if self.owner else "")


def uses(fn: Any, package: str, given: Iterable[Any] = (), by_reference: Sequence[str] = ()) -> bool:
    """Tell whether `fn`, or user code that it refers to, imports `package` or names an object of it.

    `given` are its arguments. Imports nothing, and gives the same answer wherever the ranks run.
    """
    if any(_belongs(value, package) for value in (fn, *given)):
        return True
    for function, captures in _travelling(fn, by_reference, is_code):
        if any(_belongs(capture.value, package) for capture in captures):
            return True
        if isinstance(function, FunctionType):
            named = (function.__globals__.get(name) for name in globals_of(function.__code__))
            if _imports(function.__code__, package) or any(_belongs(value, package) for value in named):
                return True
    return False


def _belongs(value: Any, package: str) -> bool:
    """Tell whether `value` is a module, function or class of `package`, or an instance of such a class or subclass."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] == package
    kinds = value.__mro__ if isinstance(value, type) else (value, *type(value).__mro__)
    homes = (getattr(kind, "__module__", None) for kind in kinds)
    return any(isinstance(home, str) and home.partition(".")[0] == package for home in homes)


def _imports(code: CodeType, package: str) -> bool:
    names = (i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME")
    found = any(name.partition(".")[0] == package for name in names)
    return found or any(_imports(inner, package) for inner in nested(code))


# ---- what a function captures


def captures_of(fn: Any, by_reference: Sequence[str]) -> Iterator[Capture]:
    for _, captures in _travelling(fn, by_reference, _is_helper):
        yield from (capture for capture in captures if not _is_helper(capture.value))


def _travelling(
    fn: Any, by_reference: Sequence[str], follow: Callable[[Any], bool]
) -> Iterator[tuple[Any, list[Capture]]]:
    """Yield `fn` and the captured code for which `follow` is true, each once and with its own captures."""
    seen: set[int] = set()
    queue = [fn]
    while queue:
        function = queue.pop()
        if id(function) not in seen:
            seen.add(id(function))
            captures = list(own_captures(function, by_reference))
            yield function, captures
            queue += [capture.value for capture in captures if follow(capture.value)]


def own_captures(fn: Any, by_reference: Sequence[str]) -> Iterator[Capture]:
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
        if not goes_by_value(fn, by_reference):
            return
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                yield Capture(variable, cell.cell_contents, name)
            except ValueError:  # a variable that is not set yet
                continue
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
    elif not isinstance(fn, type):  # an object with __call__
        yield from (Capture(f"self.{key}", value, name) for key, value in attributes(fn))
        if isinstance(call := vars(type(fn)).get("__call__"), FunctionType):
            yield Capture("__call__", call, name)


def is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, functools.partial))


def _is_helper(value: Any) -> bool:
    """Tell whether a capture is searched as part of the function; a method is reported as the object it is bound to."""
    return is_code(value) and not isinstance(value, MethodType) and not spark_type(value)


def functions_of(fn: Any, by_reference: Sequence[str]) -> Iterator[FunctionType]:
    """Yield the functions that are pickled by value: `fn` and those it refers to."""
    for function, _ in _travelling(fn, by_reference, is_code):
        if isinstance(function, FunctionType) and goes_by_value(function, by_reference):
            yield function


def globals_of(code: CodeType) -> list[str]:
    """List the names of the globals that the code, and code nested in it, loads."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for inner in nested(code):
        names += globals_of(inner)
    return list(dict.fromkeys(names))


def nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def goes_by_value(fn: FunctionType, by_reference: Sequence[str]) -> bool:
    """Tell whether a function is pickled by value, with its code and globals; otherwise the ranks import it."""
    module = sys.modules.get(fn.__module__ or "")
    if module is None or fn.__module__ in ("__main__", "__mp_main__") or "<" in fn.__qualname__:
        return True
    return ship.is_users_own(module, tuple(os.path.abspath(path) for path in by_reference))


def attributes(value: Any) -> list[tuple[str, Any]]:
    """List the attributes that are pickled with an object; none for a class that defines its own pickling."""
    own = ("__getstate__", "__reduce__", "__reduce_ex__")
    if any(name in vars(kind) for kind in type(value).__mro__ if kind is not object for name in own):
        return []
    found = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in found and hasattr(value, slot):
                found[slot] = getattr(value, slot)
    return list(found.items())


def inside(capture: Capture) -> list[Capture]:
    """List what is one level inside a container or an object."""
    value, name = capture.value, capture.name
    if isinstance(value, (*_LEAVES, ModuleType)) or spark_type(value):
        return []
    if isinstance(value, Mapping):
        items = [(f"{name}[{key!r}]", item) for key, item in first(value.items())]
    elif isinstance(value, (list, tuple)):
        items = [(f"{name}[{i}]", item) for i, item in first(enumerate(value))]
    elif isinstance(value, (set, frozenset)):
        items = [(f"an element of {name}", item) for item in first(value)]
    elif is_code(value):
        return [c for c in own_captures(value, ()) if c.value is not value]
    else:
        items = [(f"{name}.{key}", item) for key, item in first(attributes(value))]
    return [Capture(inner, item, capture.owner) for inner, item in items]


def first(items: Any) -> list[Any]:
    return [item for item, _ in zip(items, range(_ITEMS), strict=False)]


def spark_type(value: Any) -> str | None:
    """Return the key in SPARK of an object that ranks can't use; None for any other, such as a Row."""
    if "pyspark" not in sys.modules:
        return None
    attributes = getattr(value, "__dict__", None) or {}
    if isinstance(value, FunctionType):
        return "UDF" if "evalType" in attributes and "returnType" in attributes else None
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    for kind in type(value).__mro__ if "pyspark" in packages else ():
        if kind.__name__ in SPARK and kind.__module__.partition(".")[0] == "pyspark":
            return kind.__name__
    if "pyspark" in packages and any(type(held).__module__.startswith("py4j.") for held in attributes.values()):
        return "JVM"
    return "JVM" if "py4j" in packages else None


# ---- words


def title(fn: Any) -> str:
    name = bare(fn)
    return "the lambda" if name == "<lambda>" else f"{name}()"


def bare(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return bare(fn.func)
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return str(name).rpartition("<locals>.")[2]


def described(value: Any) -> str:
    kind = type(value)
    home = kind.__module__
    short = kind.__qualname__ if home == "builtins" or home.startswith("pyspark.") else f"{home}.{kind.__qualname__}"
    return f"{'an' if short[0] in 'AEIO' else 'a'} {short}"
