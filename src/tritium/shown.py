"""Settings as text, for the `repr` of objects that have them (any process)."""

from __future__ import annotations

import dataclasses
import signal as signals
from collections.abc import Mapping
from typing import Any

from tritium.errors import masked

_LONGEST = 80
_SIMPLE = (type(None), bool, int, float, str)


def shown(value: Any) -> str:
    """Return a value as a short text: a function or an object by its name, without passwords of URLs."""
    text = _text(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…{text[-1]}"


def call(name: str, settings: Mapping[str, Any], first: str = "") -> str:
    """Return the call with these settings: `Gang(ranks=4, env=['TOKEN'])`.

    first : the text before the settings.
    """
    listed = [f"{key}={text}" for key, text in texts(settings).items()]
    return f"{name}({', '.join([first] * bool(first) + listed)})"


def texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings as short texts; of environment variables the names alone."""
    return {key: shown(sorted(value) if key == "env" else value) for key, value in settings.items()}


def changed(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    return {name: value for name, value in settings.items() if name not in defaults or not _same(value, defaults[name])}


def changed_fields(thing: Any) -> dict[str, Any]:
    """Return the fields of a dataclass's instance that differ from their defaults."""
    fields = dataclasses.fields(thing)
    defaults = {one.name: one.default for one in fields if one.default is not dataclasses.MISSING}
    made_defaults = {
        one.name: one.default_factory() for one in fields if one.default_factory is not dataclasses.MISSING
    }
    return changed({one.name: getattr(thing, one.name) for one in fields}, {**defaults, **made_defaults})


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):  # A Param keeps a tuple as a list.
        return len(value) == len(default) and all(map(_same, value, default))
    simple = isinstance(value, _SIMPLE) or (isinstance(value, Mapping) and not value)
    return simple and type(value) is type(default) and bool(value == default)


def _text(value: Any) -> str:
    if isinstance(value, _SIMPLE):
        return masked(repr(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(getattr(value, "__name__", type(value).__name__))


def signal_name(number: int) -> str:
    """Return the name of a signal: 9 → "SIGKILL"."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
