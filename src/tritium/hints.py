"""Suggestions for an unknown word, as the end of an error message (any process)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_WORDS_LISTED = 20


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the word of `known` that is most like `word`, or None where none is like it."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), None)


def question(*near: str) -> str:
    """Return " Did you mean 'a' or 'b'?", or "" without words."""
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question for the word of `known` that is most like `word`, or "" where none is like it."""
    near = nearest(word, known)
    return "" if near is None else question(near)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the question for up to three words like `word`, or that differ in case only, and a list of all."""
    words = list(known)
    near = difflib.get_close_matches(word, words)
    near += [other for other in words if other.lower() == word.lower() and other not in near]
    shown = ", ".join(words[:_WORDS_LISTED]) + (
        f" and {len(words) - _WORDS_LISTED} more" if len(words) > _WORDS_LISTED else ""
    )
    return f"{question(*near)} There is: {shown}."
