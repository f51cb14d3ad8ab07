"""A field of a settings dataclass with its documentation, and checks of its values (any process)."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def setting(doc: str, default: Any = MISSING) -> Any:
    """Return a dataclass field whose `doc` is also the documentation of the Spark ML Param."""
    return field(metadata={"doc": doc}) if default is MISSING else field(default=default, metadata={"doc": doc})


def is_whole(value: Any, least: int) -> bool:
    """Return whether `value` is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Return whether `value` is an int or a float; a bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_names(value: Any) -> bool:
    """Return whether `value` is a column's name, or a list of at least one."""
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list | tuple) and bool(names) and all(isinstance(n, str) and n for n in names)
