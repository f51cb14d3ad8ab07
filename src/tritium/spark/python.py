"""Find and check the Python that Spark's workers run, on a local master (driver)."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tritium.errors import WrongVersion
from tritium.spark import is_connect
from tritium.spark.inside.plans import python_function

VARIABLE = "PYSPARK_PYTHON"
NEEDED = ("pyarrow", "numpy")
_DEFAULT = "python3"  # Spark runs the first on the PATH by default.
_LOOK = (
    "import importlib.util, json, sys\n"
    "print(json.dumps([sys.version_info[:2], [m for m in sys.argv[1:] if importlib.util.find_spec(m) is None]]))"
)
_LOOK_SECONDS = 20.0
_CAP_SYS_RESOURCE = 24
_lock = threading.Lock()
_noted = False


@contextmanager
def drivers_python(spark: Any) -> Iterator[None]:
    """On a local master, let UDFs that are made in this block run in this Python, unless PYSPARK_PYTHON is set.

    Spark would start the `python3` of the PATH, which is another one when a script is run by the path of its Python
    (`.venv/bin/python train.py`), by an IDE or by Jupyter. The session's own setting is restored afterwards.
    """
    context = _context_here(spark)
    if context is None:
        yield
        return
    with _lock:  # Taken before the variable is read, as another launch may have set it for its own block.
        if not unchosen(context.pythonExec):
            yield
            return
        context.pythonExec = sys.executable
        try:
            yield
        finally:
            context.pythonExec = _DEFAULT


def note_of_functions(spark: Any, frames: Iterable[Any]) -> str | None:
    """Return a note, once a process, where Python functions in these DataFrames run in another Python than this.

    Only Tritium's own tasks run in the driver's: a function of the user's keeps the Python that Spark chose for it.
    """
    global _noted
    context = None if _noted else _context_here(spark)
    if context is None or not unchosen(context.pythonExec) or is_drivers_own(_DEFAULT):
        return None
    function = python_function(frames)
    if function is None:
        return None
    _noted = True
    other = shutil.which(_DEFAULT) or _DEFAULT
    return (
        f"Python functions of this DataFrame ({function}) run in {other}, Spark's default, not in this "
        f"Python. If one fails there: os.environ[{VARIABLE!r}] = {sys.executable!r} before the session is made"
    )


def told_which(spark: Any, problem: WrongVersion) -> WrongVersion:
    """Return `problem`, with the Python that the session's UDFs run, where none was chosen with PYSPARK_PYTHON."""
    context = _context_here(spark)
    if context is None or not unchosen(context.pythonExec):
        return problem
    told = WrongVersion(
        f"{problem} The UDFs of this session run {shutil.which(context.pythonExec)}, the first "
        f"{context.pythonExec} of the PATH: os.environ[{VARIABLE!r}] = sys.executable, before the session is "
        "made, has them run this one.",
        **problem.__dict__,
    )
    told.__cause__ = problem.__cause__
    return told


def _context_here(spark: Any) -> Any:
    """Return the SparkContext of a classic session whose workers all run on this machine; else None."""
    context = None if is_connect(spark) else spark.sparkContext
    return context if context is not None and on_this_machine(context.master) else None


def unchosen(python: str) -> bool:
    """Tell whether `python`, a session's setting, is only Spark's default."""
    return python == _DEFAULT and VARIABLE not in os.environ


def on_this_machine(master: str) -> bool:
    """Tell whether every worker of this master runs on this machine."""
    return master == "local" or master.startswith(("local[", "local-cluster["))


def may_raise_limits() -> bool:
    """Tell whether this process may raise a hard limit; also True on systems without capabilities."""
    try:
        with open("/proc/self/status", errors="replace") as status:
            held = next(line for line in status if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return True
    return bool(int(held.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)


def check(python: str) -> None:
    """Raise WrongVersion when `python` lacks a package, or is of another version than the driver's."""
    problem = None if is_drivers_own(python) else _problem(python)
    if problem is not None:
        raise WrongVersion(
            f"The Python of Spark's workers, {python} ({VARIABLE}), {problem}. Set {VARIABLE}={sys.executable}, this "
            f"driver's own, before the session is made: os.environ[{VARIABLE!r}] = sys.executable.",
            python=python,
        )


def is_drivers_own(python: str) -> bool:
    """Tell whether `python` is this process's interpreter, in the same folder (virtual environments differ by that)."""
    program = shutil.which(python)
    if program is None or os.path.dirname(os.path.abspath(program)) != os.path.dirname(sys.executable):
        return False
    return os.path.realpath(program) == os.path.realpath(sys.executable)


@functools.cache
def _problem(python: str) -> str | None:
    if shutil.which(python) is None:
        return "is not there"
    try:
        answer = subprocess.run(
            [python, "-c", _LOOK, *NEEDED], capture_output=True, text=True, timeout=_LOOK_SECONDS, check=True
        )
        version, missing = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"can't be run: {error}"
    if missing:
        return f"lacks {' and '.join(map(repr, missing))}"
    if tuple(version) != sys.version_info[:2]:
        return f"is {version[0]}.{version[1]}, and the driver's is {sys.version_info[0]}.{sys.version_info[1]}"
    return None
