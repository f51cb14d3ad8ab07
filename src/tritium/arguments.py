"""A function's name, and the arguments it can be called with (any process)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tritium.errors import BadSetting


def name_of(thing: Any) -> str:
    """Return the name of a function, or of an object's class."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def needed_arguments(function: Callable[..., Any], *kinds: inspect._ParameterKind) -> list[str]:
    """Return the arguments without a default that a function takes by position, or of these other kinds."""
    kinds = kinds or (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in _parameters(function) or () if p.default is p.empty and p.kind in kinds]


def argument_names(function: Callable[..., Any]) -> list[str]:
    """Return all arguments of a function; none where they can't be known."""
    return [p.name for p in _parameters(function) or ()]


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether `function` can be called with `count` positional arguments. True where that can't be known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some builtins have no signature.
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Return whether `function` takes no positional argument at all."""
    parameters = _parameters(function)
    return parameters is not None and all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)


def takes_vocabulary(model: Any) -> bool:
    """Return whether a function that makes a model takes the words of columns, by the name of its argument."""
    return needed_arguments(model) == ["vocabulary"]


def refuse_methods(callbacks: Sequence[Any], base: type, *, optional: bool) -> None:
    """Raise BadSetting for a callback with a method `on_…` that can't be called as that of its base class.

    optional : whether it is also called with the arguments that have a default there.
    """
    for callback in callbacks:
        for method in (name for name in dir(base) if name.startswith("on_")):
            known = argument_names if optional else needed_arguments
            passed, implementation = known(getattr(base, method))[1:], getattr(callback, method, None)
            if implementation is not None and not takes(implementation, len(passed)):
                arguments = ", ".join(argument_names(implementation)) or "nothing"
                raise BadSetting(
                    f"{method} of the callback {name_of(callback)} takes {arguments}; it is called with "
                    f"({', '.join(passed)}).",
                    setting="callbacks",
                )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # Some builtins have no signature.
        return None
