"""Find the objects that are pickled along with the user's function (driver).

"Captures" are the objects that are pickled with a function: variables of the functions around it, globals that its code
names (also through other functions of the user's), default values, attributes of the object it is a method of, and
its arguments.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tritium.closures import Capture, attributes, globals_of, goes_by_value, is_code, nested, own_captures

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
"""Class of Spark's → advice. "UDF": a function that `udf` has made. "JVM": a holder of an object of Java."""
_ITEMS_SEARCHED = 1000
"""The items of a container that are searched."""
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, range, slice)


def uses(fn: Any, package: str, given: Iterable[Any] = (), by_reference: Sequence[str] = ()) -> bool:
    """Tell whether `fn`, or user code that it refers to, imports `package` or names an object of it.

    given : the arguments of `fn`.
    Imports nothing, and gives the same answer wherever the ranks run.
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
    imports_here = any(name.partition(".")[0] == package for name in names)
    return imports_here or any(_imports(inner, package) for inner in nested(code))


# ---- The captures of a function


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


def _is_helper(value: Any) -> bool:
    """Tell whether a capture is searched as part of the function; a method is reported as the object it is bound to."""
    return is_code(value) and not isinstance(value, MethodType) and not spark_type(value)


def functions_of(fn: Any, by_reference: Sequence[str]) -> Iterator[FunctionType]:
    """Yield the functions that are pickled by value: `fn` and those it refers to."""
    for function, _ in _travelling(fn, by_reference, is_code):
        if isinstance(function, FunctionType) and goes_by_value(function, by_reference):
            yield function


def inside(capture: Capture) -> list[Capture]:
    """List the objects one level inside a container or an object."""
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
    return [item for item, _ in zip(items, range(_ITEMS_SEARCHED), strict=False)]


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
