"""A field of a settings dataclass with its documentation, and checks of its values (any process)."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any

from tritium.checkpoint.identity import Resume


def setting(doc: str, default: Any = MISSING, *, resume: Resume) -> Any:
    """Return a dataclass field whose `doc` is also the documentation of the Spark ML Param.

    resume : what must be equal for a training to continue from a checkpoint.
    """
    metadata = {"doc": doc, "resume": resume}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


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
