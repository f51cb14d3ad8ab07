"""Keras in this process: its import on a back end, and names that start from 1 (any process)."""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from tritium.errors import WrongVersion
from tritium.triton_first import import_triton

VARIABLE = "KERAS_BACKEND"


def imported(backend: str | None = None) -> Any:
    """Import Keras if this process has not yet, and return it.

    backend : the back end on which it is imported, unless KERAS_BACKEND names one. Keras reads that variable, which is
              restored afterwards.

    Raises WrongVersion where Keras or the back end is missing.
    """
    if not {"keras", "tensorflow"} & sys.modules.keys() and find_spec("tensorflow") is not None:
        import_triton()  # Keras imports TensorFlow, whatever its back end
    if "keras" in sys.modules or backend is None or VARIABLE in os.environ:
        return _import()
    os.environ[VARIABLE] = backend
    try:
        return _import()
    finally:
        del os.environ[VARIABLE]


def _import() -> Any:
    try:
        import keras
    except ModuleNotFoundError as error:
        raise WrongVersion(
            f"Keras, or its back end, is missing: {sys.executable} has no {error.name}. Install it there: "
            f"{sys.executable} -m pip install keras, and {error.name}; or choose another back end: {VARIABLE}=torch.",
            library=error.name,
        ) from error
    return keras


@contextmanager
def fresh_names() -> Iterator[None]:
    """Name the layers that are made in the block as in a new process: "dense", not "dense_7"."""
    import keras  # noqa: F401 - the module below is part of it
    from keras.src.backend.common import global_state

    before = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", collections.defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", before)
