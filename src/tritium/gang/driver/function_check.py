"""Check, before anything starts, that the user's function and its captures can be sent to the ranks (driver)."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tritium import ship
from tritium.closures import Capture, bare, described, is_code, nested, title
from tritium.errors import BadFunction
from tritium.gang.driver.captures import SPARK, captures_of, functions_of, inside, spark_type

LARGE_BYTES = 10 << 20

_CUDA = re.compile(r"cuda:\d+")
_DEPTH = 6
"""The levels of containers and objects that are searched for one that can't be pickled."""


def inspect(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    by_reference: Sequence[str] = (),
) -> list[str]:
    """Return warnings about `fn`: "cuda:0" in its code, a captured model or tensor on a GPU, a capture over 10 MB.

    by_reference : the user's `py_files`, whose modules the ranks import.
    Raises BadFunction for objects that live in Spark (see `captures.SPARK`), however deep in containers and objects,
    and for any that can't be pickled. Every warning and error names the variable.
    """
    captures = list(captures_of(fn, by_reference))
    captures += [Capture(f"args[{i}]", value, "") for i, value in enumerate(args)]
    captures += [Capture(f"kwargs[{name!r}]", value, "") for name, value in (kwargs or {}).items()]
    for capture in captures:
        for inner in (capture, *inside(capture)):
            _refuse_spark(inner)
    sizes = [_size(capture.value) for capture in captures]  # Before pickling, which may fail for one of them.
    payload = _pickle(fn, args, kwargs or {}, captures, by_reference)
    warnings = [_hard_coded(function) for function in functions_of(fn, by_reference)]
    warnings += [_on_gpu(capture) for capture in captures]
    warnings += _large(captures, sizes, payload, by_reference)
    return list(dict.fromkeys(warning for warning in warnings if warning))


def _refuse_spark(capture: Capture) -> None:
    kind = spark_type(capture.value)
    if kind is not None:
        raise BadFunction(f"{capture} can't go to the ranks. {SPARK[kind]}", variable=capture.name)


def _pickle(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], captures: list[Capture], by_reference: Sequence[str]
) -> bytes:
    try:
        return ship.pickle_for_ranks((fn, tuple(args), dict(kwargs)), by_reference, _refuse)[0]
    except Exception as error:
        capture = next((c for c in captures if _refusal(c.value, by_reference) is not None), None)
        if capture is None and isinstance(error, _InSpark):
            raise BadFunction(f"{title(fn)} can't go to the ranks: {error}", variable=bare(fn)) from None
        if capture is None:
            raise BadFunction(f"{title(fn)} can't be pickled: {error}", variable=bare(fn)) from error
        culprit, reason = _deepest(capture, by_reference)
        _refuse_spark(culprit)
        if isinstance(reason, _InSpark):
            raise BadFunction(f"{culprit} can't go to the ranks: {reason}", variable=culprit.name) from None
        raise BadFunction(
            f"{culprit} can't be pickled, so it can't go to the ranks: {reason}. Make it inside the function, or leave "
            "it out of what the function uses.",
            variable=culprit.name,
        ) from error


class _InSpark(Exception):
    """An object of Spark's is among those that are pickled."""

    def __init__(self, value: Any, kind: str) -> None:
        super().__init__(f"it holds {described(value)}. {SPARK[kind]}")


def _refuse(value: Any) -> None:
    if (kind := spark_type(value)) is not None:
        raise _InSpark(value, kind)


def _refusal(value: Any, by_reference: Sequence[str]) -> Exception | None:
    try:
        ship.pickle_for_ranks(value, by_reference, _refuse)
    except Exception as error:  # noqa: BLE001 - a class may refuse to be pickled in any way
        return error
    return None


def _deepest(capture: Capture, by_reference: Sequence[str]) -> tuple[Capture, Exception]:
    """Return the innermost part of a capture that can't be pickled, and the exception with the reason."""
    reason = _refusal(capture.value, by_reference)
    assert reason is not None
    for _ in range(_DEPTH):
        for inner in inside(capture):
            refusal = _refusal(inner.value, by_reference)
            if refusal is not None:
                capture, reason = inner, refusal
                break
        else:
            break
    return capture, reason


def _hard_coded(fn: FunctionType) -> str | None:
    first_device = next(_devices(fn.__code__), None)
    if first_device is None:
        return None
    device, line = first_device
    return (
        f"{title(fn)} names {device!r} (line {line}): all ranks of a host would share that GPU. "
        "Use tritium.world().device."
    )


def _devices(code: CodeType) -> Iterator[tuple[str, int]]:
    line = code.co_firstlineno
    starts = dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        if isinstance(instruction.argval, str) and _CUDA.fullmatch(instruction.argval):
            yield instruction.argval, line
    for inner in nested(code):
        yield from _devices(inner)


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
        if size is None and _refusal(capture.value, by_reference) is None:  # Its owner may leave it out.
            size = len(ship.pickle(capture.value, by_reference))
        if size is not None and size > LARGE_BYTES:
            yield (
                f"{capture} is {size / 1e6:,.0f} MB, sent with every task. Rows belong in data=; let the ranks read "
                "other large things from where they are stored."
            )


def _size(value: Any) -> int | None:
    """Return the size in bytes where the value knows it; None where only pickling it would tell."""
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, (int, float, bool, type(None), ModuleType, type)) or is_code(value):
        return 0
    size = getattr(value, "nbytes", None)  # NumPy, torch and Arrow have it.
    return size if isinstance(size, int) else None
