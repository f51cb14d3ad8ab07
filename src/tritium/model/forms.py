"""The forms of values in the JSON of a saved model, checked before they are used (any process)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tritium.errors import MALFORMED, ModelError


@dataclass(frozen=True)
class Requirement:
    """A requirement on a value: a test, and its name for messages."""

    name: str
    fits: Callable[[Any], bool]


_ORIGIN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _is_unicode(text: str) -> bool:
    """Return whether this is text that can be written: JSON may hold halves of characters, no Arrow column does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


ANYTHING = Requirement("anything", lambda value: True)
TEXT = Requirement("a string", lambda value: isinstance(value, str) and _is_unicode(value))
BOOL = Requirement("true or false", lambda value: isinstance(value, bool))
FILE = Requirement(
    "the name of a file in this directory",
    lambda value: isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value, re.ASCII) is not None,
)
WHOLE = Requirement(
    "a whole number of at least 0", lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0
)
NUMBER = Requirement("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
ORIGIN = Requirement(
    "a name such as 'package.module:name'",
    lambda value: isinstance(value, str) and _ORIGIN.fullmatch(value) is not None,
)


def one_of(*values: Any) -> Requirement:
    """Return the form of one of these values."""
    return Requirement(" or ".join(map(repr, values)), lambda value: isinstance(value, str) and value in values)


def either(*forms: Requirement) -> Requirement:
    """Return the form of a value that has one of these forms."""
    return Requirement(" or ".join(form.name for form in forms), lambda value: any(form.fits(value) for form in forms))


def optional(form: Requirement) -> Requirement:
    """Return the form of a value that may be missing, or null."""
    return Requirement(f"{form.name}, or null", lambda value: value is None or form.fits(value))


def list_of(form: Requirement) -> Requirement:
    """Return the form of a list of these."""
    return Requirement(
        f"a list, of each {form.name}", lambda value: isinstance(value, list | tuple) and all(map(form.fits, value))
    )


def mapping_of(form: Requirement, names: Requirement = TEXT) -> Requirement:
    """Return the form of an object whose values have this form, and its keys that of `names`."""
    return Requirement(
        f"an object, of each {form.name}" + (f", by {names.name}" if names is not TEXT else ""),
        lambda value: (
            isinstance(value, Mapping) and all(map(names.fits, value)) and all(map(form.fits, value.values()))
        ),
    )


def having(**forms: Requirement) -> Requirement:
    """Return the form of an object that has at least these fields."""
    return Requirement(
        f"an object with {', '.join(forms)}",
        lambda value: isinstance(value, Mapping) and not wrong(value, forms),
    )


def wrong(value: Mapping[str, Any], forms: Mapping[str, Requirement]) -> list[str]:
    """Return a text for each field that does not have its form; one that is missing is as if it were null."""
    return [
        f"{name!r} is {value.get(name)!r:.100}, and must be {form.name}"
        for name, form in forms.items()
        if not form.fits(value.get(name))
    ]


def check(value: Any, forms: Mapping[str, Requirement], where: str) -> None:
    """Raise ModelError unless `value` is an object whose fields have these forms. `where` begins the message."""
    if not isinstance(value, Mapping):
        raise ModelError(f"{where} is damaged: it holds {value!r:.100}, and must hold an object.")
    if problems := wrong(value, forms):
        raise ModelError(f"{where} is damaged: {'; '.join(problems)}.")


def parsed(text: bytes, where: str) -> Any:
    """Return the value of a JSON text. Raises ModelError, whose message begins with `where`."""
    try:
        return json.loads(text)
    except MALFORMED as error:
        raise ModelError(f"{where} is damaged: {error}.") from error
