"""Lets a Python of the tests skip what libraries import only because it is installed: up to half of an import.

And lets Spark's Python daemon import once what its workers need: pandas, pyarrow and PySpark, and what
TRITIUM_TEST_IMPORTS names.

On the path of every process that tests start, and run by conftest.py. Seconds of processor time that an import takes
less in each rank: Keras 0.9 (JAX) to 2.1 (torch), TensorFlow 2.1. Code of tests and of Tritium imports what it likes;
examples run without this, as a user's program does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

OPTIONAL = {  # package -> modules that use it where it is there; with a dot at the end, all that are in a package
    "jax": ("keras.src.callbacks.orbax_checkpoint", "tensorflow.lite.python.util"),
    "keras": ("tensorflow",),  # registers its optimizers; tf.keras imports it later
    "matplotlib": ("keras.src.",),
    "pandas": ("keras.src.trainers.data_adapters.array_slicing",),
    "sklearn": ("keras.src.wrappers.",),
}
IMPORTING = ("importlib", "_frozen_importlib")


class Lean(MetaPathFinder):
    """Finds none of these packages for these modules."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname not in OPTIONAL:
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(IMPORTING):
            frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
        for user in OPTIONAL[fullname]:
            if module == user or (user.endswith(".") and module.startswith(user)):
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


sys.meta_path.insert(0, Lean())
if "pyspark.daemon" in sys.orig_argv:
    import from_warm

    from_warm.install()
    # PySpark as it is installed, with bytecode: of its zip, each Python worker would compile what it imports. Python
    # 3.10 and 3.11 also read the directories of all zips again at each task, Spark's jar among them: 0.15 s.
    sys.path[:] = [entry for entry in sys.path if not ("pyspark" in entry and entry.endswith((".zip", ".jar")))]
    sys.path_importer_cache.clear()  # they were searched for this module
    # Imported once, and not in each worker that is forked. The only thread that this starts is that of Arrow's
    # allocator, which takes care of forks itself.
    with contextlib.suppress(ImportError):  # where a test's Python lacks one
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
        import pyspark.sql.pandas.serializers
        import pyspark.worker  # noqa: F401
    for name in os.environ.pop("TRITIUM_TEST_IMPORTS", "").split():
        importlib.import_module(name)
    gc.freeze()  # Spark's workers look for garbage after every task
