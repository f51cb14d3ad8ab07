"""A function's name, and the arguments it can be called with (any process)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def name_of(thing: Any) -> str:
    """A function's name, or an object's class."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def needed_arguments(function: Callable[..., Any], *kinds: inspect._ParameterKind) -> list[str]:
    """The arguments without a default that a function takes by position, or in these other ways."""
    kinds = kinds or (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in _parameters(function) or () if p.default is p.empty and p.kind in kinds]


def argument_names(function: Callable[..., Any]) -> list[str]:
    """All arguments of a function; none where they can't be known."""
    return [p.name for p in _parameters(function) or ()]


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with so many arguments by position. True where that can't be known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether it can't be given a single argument by position."""
    parameters = _parameters(function)
    return parameters is not None and all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return None
