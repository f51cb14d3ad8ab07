"""The extras of Tritium, for errors about a library that is missing (any process)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tritium.errors import WrongVersion

_EXTRAS = {"torch": "torch", "lightgbm": "lightgbm", "onnxruntime": "onnx", "pyspark": "spark", "pandas": "spark"}


@contextmanager
def needed(what: str) -> Iterator[None]:
    """Raise WrongVersion in place of a ModuleNotFoundError for a library that an extra brings along."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        extra = _EXTRAS[missing]
        raise WrongVersion(
            f"{what} needs {missing}, which {sys.executable} does not have. Install Tritium with its extra "
            f"{extra!r} (pip install 'tritium[{extra}]'), or {missing} itself.",
            library=missing,
        ) from error
