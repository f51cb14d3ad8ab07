"""The user's function is looked at before anything starts: what it captures, and what can't go to the ranks (driver).

"Captures" are the things that travel with a function: variables of the functions around it, globals that its code
names (also through other functions of the user's), default values, attributes of the object it is a method of, and
its arguments.
"""

from __future__ import annotations

import dis
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tritium import ship
from tritium.errors import BadFunction

LARGE_BYTES = 10 << 20

_SPARK = {
    "SparkSession": "Spark lives on the driver only: do its work before the launch, and pass a DataFrame as data=.",
    "SparkContext": "Spark lives on the driver only: do its work before the launch, and pass a DataFrame as data=.",
    "DataFrame": 'Pass it as data={"train": df}; a rank reads its rows with tritium.world().shard("train").',
    "RDD": 'Make a DataFrame of it and pass that as data={"train": df}; ranks read tritium.world().shard("train").',
    "Broadcast": "Pass its value itself: args=(broadcast.value,).",
}
_CUDA = re.compile(r"cuda:\d+")
_DEPTH = 6  # how far into containers and objects the search goes for what can't be pickled
_ITEMS = 1000  # and how far along a container
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, range, slice)


@dataclass(frozen=True)
class Capture:
    """One thing that travels with the function."""

    name: str  # as the user wrote it: df, self.session, args[0]
    value: Any
    owner: str  # the function that captures it: train(), or "" for arguments

    def __str__(self) -> str:
        return f"{self.name!r} ({_a(self.value)})" + (f", which {self.owner} captures" if self.owner else "")


def inspect(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    by_reference: Sequence[str] = (),
) -> list[str]:
    """Warnings about `fn`; BadFunction when it, or something it captures, can't go to the ranks.

    An error: a SparkSession, SparkContext, DataFrame or RDD, also one level inside a container or an object; anything
    that can't be pickled. A warning: "cuda:0" written in the code, a model or tensor that is on a GPU, anything over
    10 MB. Each names the variable. `by_reference`: the user's `py_files`, whose modules the ranks import.
    """
    captures = list(_captures(fn, by_reference))
    captures += [Capture(f"args[{i}]", value, "") for i, value in enumerate(args)]
    captures += [Capture(f"kwargs[{name!r}]", value, "") for name, value in (kwargs or {}).items()]
    for capture in captures:
        for inner in (capture, *_inside(capture)):
            _refuse_spark(inner)
    sizes = [_size(capture.value) for capture in captures]  # before pickling: a broken one may be large, too
    payload = _pickle(fn, args, kwargs or {}, captures, by_reference)
    warnings = [_hard_coded(function) for function in _functions(fn, by_reference)]
    warnings += [_on_gpu(capture) for capture in captures]
    warnings += _large(captures, sizes, payload, by_reference)
    return list(dict.fromkeys(warning for warning in warnings if warning))


def uses(fn: Any, package: str, given: Iterable[Any] = (), by_reference: Sequence[str] = ()) -> bool:
    """Whether `fn`, or code of the user's that it refers to, imports `package`, or names something of it.

    `given` are its arguments. Nothing is imported, and the answer is the same wherever the ranks run.
    """
    if any(_belongs(value, package) for value in (fn, *given)):
        return True
    for function, captures in _travelling(fn, by_reference, _is_code):
        if any(_belongs(capture.value, package) for capture in captures):
            return True
        if isinstance(function, FunctionType):
            named = (function.__globals__.get(name) for name in _globals_of(function.__code__))
            if _imports(function.__code__, package) or any(_belongs(value, package) for value in named):
                return True
    return False


def _belongs(value: Any, package: str) -> bool:
    """Whether it is a module, function or class of this package, or an object whose class derives from one of it."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] == package
    kinds = value.__mro__ if isinstance(value, type) else (value, *type(value).__mro__)
    homes = (getattr(kind, "__module__", None) for kind in kinds)
    return any(isinstance(home, str) and home.partition(".")[0] == package for home in homes)


def _imports(code: CodeType, package: str) -> bool:
    names = (i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME")
    found = any(name.partition(".")[0] == package for name in names)
    return found or any(_imports(nested, package) for nested in _nested(code))


# ---- what a function captures


def _captures(fn: Any, by_reference: Sequence[str]) -> Iterator[Capture]:
    for _, captures in _travelling(fn, by_reference, _is_helper):
        yield from (capture for capture in captures if not _is_helper(capture.value))


def _travelling(
    fn: Any, by_reference: Sequence[str], follow: Callable[[Any], bool]
) -> Iterator[tuple[Any, list[Capture]]]:
    """`fn` and the code that it refers to, as far as `follow` says, each once and with what it captures itself."""
    seen: set[int] = set()
    queue = [fn]
    while queue:
        function = queue.pop()
        if id(function) not in seen:
            seen.add(id(function))
            captures = list(_own_captures(function, by_reference))
            yield function, captures
            queue += [capture.value for capture in captures if follow(capture.value)]


def _own_captures(fn: Any, by_reference: Sequence[str]) -> Iterator[Capture]:
    name = _title(fn)
    if isinstance(fn, functools.partial):
        yield Capture(_bare(fn.func), fn.func, name)
        yield from (Capture(f"argument {i}", value, name) for i, value in enumerate(fn.args))
        yield from (Capture(key, value, name) for key, value in fn.keywords.items())
    elif isinstance(fn, MethodType):
        if not isinstance(fn.__self__, (type, ModuleType)):
            yield from (Capture(f"self.{key}", value, name) for key, value in _attributes(fn.__self__))
        yield Capture(_bare(fn.__func__), fn.__func__, name)
    elif isinstance(fn, FunctionType):
        if not _goes_by_value(fn, by_reference):
            return
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                yield Capture(variable, cell.cell_contents, name)
            except ValueError:  # a variable that is not set yet
                continue
        for variable in _globals_of(fn.__code__):
            if variable in fn.__globals__:
                yield Capture(variable, fn.__globals__[variable], name)
        arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        defaults = fn.__defaults__ or ()
        by_name = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
        for argument, value in {**by_name, **(fn.__kwdefaults__ or {})}.items():
            yield Capture(argument, value, name)
        if wrapped := getattr(fn, "__wrapped__", None):
            yield Capture(_bare(wrapped), wrapped, name)
    elif not isinstance(fn, type):  # an object with __call__
        yield from (Capture(f"self.{key}", value, name) for key, value in _attributes(fn))
        if isinstance(call := vars(type(fn)).get("__call__"), FunctionType):
            yield Capture("__call__", call, name)


def _is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, functools.partial))


def _is_helper(value: Any) -> bool:
    """Code whose captures travel as the function's own; a method is looked at as the object that it belongs to."""
    return _is_code(value) and not isinstance(value, MethodType)


def _functions(fn: Any, by_reference: Sequence[str]) -> Iterator[FunctionType]:
    """The user's functions that travel: `fn` and those it refers to."""
    for function, _ in _travelling(fn, by_reference, _is_code):
        if isinstance(function, FunctionType) and _goes_by_value(function, by_reference):
            yield function


def _globals_of(code: CodeType) -> list[str]:
    """Names of the globals that the code, and code nested in it, loads."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for nested in _nested(code):
        names += _globals_of(nested)
    return list(dict.fromkeys(names))


def _nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _goes_by_value(fn: FunctionType, by_reference: Sequence[str]) -> bool:
    """Whether its code and globals travel; else the ranks import it."""
    module = sys.modules.get(fn.__module__ or "")
    if module is None or fn.__module__ in ("__main__", "__mp_main__") or "<" in fn.__qualname__:
        return True
    return ship.is_users_own(module, tuple(os.path.abspath(path) for path in by_reference))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """What an object takes along; nothing is known of one that says itself how it is pickled."""
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


def _inside(capture: Capture) -> list[Capture]:
    """One level into a container or an object."""
    value, name = capture.value, capture.name
    if isinstance(value, (*_LEAVES, ModuleType)) or _spark_type(value):
        return []
    if isinstance(value, Mapping):
        items = [(f"{name}[{key!r}]", item) for key, item in _first(value.items())]
    elif isinstance(value, (list, tuple)):
        items = [(f"{name}[{i}]", item) for i, item in _first(enumerate(value))]
    elif isinstance(value, (set, frozenset)):
        items = [(f"an element of {name}", item) for item in _first(value)]
    elif _is_code(value):
        return [c for c in _own_captures(value, ()) if c.value is not value]
    else:
        items = [(f"{name}.{key}", item) for key, item in _first(_attributes(value))]
    return [Capture(inner, item, capture.owner) for inner, item in items]


def _first(items: Any) -> list[Any]:
    return [item for item, _ in zip(items, range(_ITEMS), strict=False)]


# ---- what is wrong with it


def _refuse_spark(capture: Capture) -> None:
    kind = _spark_type(capture.value)
    if kind is not None:
        raise BadFunction(f"{capture} can't go to the ranks. {_SPARK[kind]}", variable=capture.name)


def _spark_type(value: Any) -> str | None:
    if "pyspark" not in sys.modules:
        return None
    for kind in type(value).__mro__:
        if kind.__name__ in _SPARK and kind.__module__.partition(".")[0] == "pyspark":
            return kind.__name__
    return None


def _pickle(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], captures: list[Capture], by_reference: Sequence[str]
) -> bytes:
    try:
        return ship.pickle((fn, tuple(args), dict(kwargs)), by_reference)
    except Exception as error:
        found = next((c for c in captures if _refusal(c.value, by_reference) is not None), None)
        if found is None:
            raise BadFunction(f"{_title(fn)} can't be pickled: {error}", variable=_bare(fn)) from error
        culprit, reason = _deepest(found, by_reference)
        raise BadFunction(
            f"{culprit} can't be pickled, so it can't go to the ranks: {reason}. Make it inside the function, or leave "
            "it out of what the function uses.",
            variable=culprit.name,
        ) from error


def _refusal(value: Any, by_reference: Sequence[str]) -> Exception | None:
    try:
        ship.pickle(value, by_reference)
    except Exception as error:  # noqa: BLE001 - a class may refuse to be pickled in any way
        return error
    return None


def _deepest(capture: Capture, by_reference: Sequence[str]) -> tuple[Capture, Exception]:
    """Follows a value that can't be pickled down to the part of it that can't."""
    reason = _refusal(capture.value, by_reference)
    assert reason is not None
    for _ in range(_DEPTH):
        for inner in _inside(capture):
            refusal = _refusal(inner.value, by_reference)
            if refusal is not None:
                capture, reason = inner, refusal
                break
        else:
            break
    return capture, reason


def _hard_coded(fn: FunctionType) -> str | None:
    found = next(_devices(fn.__code__), None)
    if found is None:
        return None
    device, line = found
    return (
        f"{_title(fn)} names {device!r} (line {line}): all ranks of a host would share that GPU. "
        "Use tritium.world().device."
    )


def _devices(code: CodeType) -> Iterator[tuple[str, int]]:
    line = code.co_firstlineno
    starts = dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        if isinstance(instruction.argval, str) and _CUDA.fullmatch(instruction.argval):
            yield instruction.argval, line
    for nested in _nested(code):
        yield from _devices(nested)


def _on_gpu(capture: Capture) -> str | None:
    torch = sys.modules.get("torch")
    value = capture.value
    if torch is None or not hasattr(torch, "nn"):
        return None
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    elif isinstance(value, torch.Tensor):
        tensors = [value]
    else:
        return None
    device = next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), None)
    if device is None:
        return None
    return (
        f"{capture} is on {device}: every rank would put it on that same GPU. Pass it on the CPU, or a function that "
        "makes it, and move it in the rank: model.to(tritium.world().device)."
    )


def _large(
    captures: list[Capture], sizes: list[int | None], payload: bytes, by_reference: Sequence[str]
) -> Iterator[str]:
    if len(payload) <= LARGE_BYTES:
        return
    for capture, size in zip(captures, sizes, strict=True):
        if size is None and _refusal(capture.value, by_reference) is None:  # its owner may leave it behind
            size = len(ship.pickle(capture.value, by_reference))
        if size is not None and size > LARGE_BYTES:
            yield (
                f"{capture} is {size / 1e6:,.0f} MB, sent with every task. Rows belong in data=; let the ranks read "
                "other large things from where they are stored."
            )


def _size(value: Any) -> int | None:
    """Bytes of what knows its size; None for the rest, which is pickled to know."""
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, (int, float, bool, type(None), ModuleType, type)) or _is_code(value):
        return 0
    size = getattr(value, "nbytes", None)  # NumPy, torch, Arrow
    return size if isinstance(size, int) else None


# ---- words


def _title(fn: Any) -> str:
    name = _bare(fn)
    return "the lambda" if name == "<lambda>" else f"{name}()"


def _bare(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return _bare(fn.func)
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _a(value: Any) -> str:
    kind = type(value)
    home = kind.__module__
    short = kind.__qualname__ if home == "builtins" or home.startswith("pyspark.") else f"{home}.{kind.__qualname__}"
    return f"a {short}"
