"""Keras in this process: its import on a back end, its seeds, names and first weights (any process)."""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
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
        import_triton()  # It must come before TensorFlow, which Keras imports whatever its back end is.
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


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and the back end as `keras.utils.set_random_seed` does, which would import TensorFlow for it.

    That takes 4 to 11 s wherever TensorFlow is installed, and is left out where neither the back end nor anything else
    has imported it.
    """
    import keras
    from keras.src.utils.module_utils import tensorflow

    if keras.backend.backend() == "tensorflow" or "tensorflow" in sys.modules or not hasattr(tensorflow, "_available"):
        keras.utils.set_random_seed(seed)
        return
    before = tensorflow._available
    tensorflow._available = False
    try:
        keras.utils.set_random_seed(seed)
    finally:
        tensorflow._available = before


_undrawn = threading.local()


@contextmanager
def undrawn() -> Iterator[None]:
    """Let variables that this thread makes in the block be zeros where their initializer would draw random numbers.

    For a model whose weights are assigned right afterwards. On JAX, to draw them compiles a program for each shape,
    which takes 0.1 to 0.4 s.
    """
    import keras

    initialize_variable = getattr(keras.Variable, "_initialize_with_initializer", None)
    if initialize_variable is not None and not hasattr(initialize_variable, "draws"):
        keras.Variable._initialize_with_initializer = _unless_undrawn(initialize_variable)
    _undrawn.here = getattr(_undrawn, "here", 0) + 1
    try:
        yield
    finally:
        _undrawn.here -= 1


def _unless_undrawn(initialize_variable: Any) -> Any:
    import keras

    drawing = keras.initializers.RandomUniform.__mro__[1]  # The base of all initializers that draw has no public name.

    @functools.wraps(initialize_variable)
    def initialize(variable: Any, initializer: Any) -> None:
        undrawn = getattr(_undrawn, "here", 0) and isinstance(initializer, drawing)
        initialize_variable(variable, _zeros if undrawn else initializer)

    initialize.draws = initialize_variable  # type: ignore[attr-defined]
    return initialize


def _zeros(shape: tuple[int, ...], dtype: Any = None) -> Any:
    import keras
    import numpy as np

    return keras.ops.convert_to_tensor(np.zeros(shape, "float32"), dtype=dtype)
