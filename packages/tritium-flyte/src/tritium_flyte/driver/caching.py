"""`cache`: what a cached result of a task depends on, beside its inputs (the driver of a run)."""

from __future__ import annotations

import dis
import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import flyte

from tritium.integration import code_of
from tritium_flyte.driver.tasks import Gang, Spark, configurations
from tritium_flyte.tables import sha256

_ALWAYS = ("tritium", "pyspark")
_RESULTS = ("ranks", "gpus", "framework", "env")
"""The fields of a gang that change what is computed, not only where or how often."""


def cache(*, salt: str = "", **options: Any) -> flyte.Cache:
    """Return a cache of results that depends on all that decides them: `TaskEnvironment(…, cache=cache())`.

    Beside the inputs (of a `Table` its rows, of a `SavedModel` its content) these are

    - the function's source without comments and docstrings, the helpers that it calls, the values that it refers to,
      in the user's own modules. Flyte's default has the source of the function alone;
    - the gang's ranks, GPUs, framework and environment variables, and Spark SQL's settings;
    - the versions of Tritium, of PySpark, and of the libraries that the function and its helpers import.

    salt    : another text has all results computed again.
    options : those of `flyte.Cache`, such as `ignored_inputs` and `serialize`.
    """
    return flyte.Cache("auto", policies=[Code()], salt=salt, **options)


class Code:
    """Flyte's cache policy of `cache`."""

    def get_version(self, salt: str, params: Any) -> str:
        """Return a hash of the salt and of what the results of this function depend on."""
        function = params.func
        if function is None:
            return sha256(salt)
        plain = inspect.unwrap(function)
        code = code_of(plain)
        parts = [salt, code.exact, code.loose, _settings(configurations.get(function)), _versions(plain)]
        return sha256("\n".join(parts))


def _settings(config: Spark | None) -> str:
    if config is None:
        return ""
    conf = sorted((name, value) for name, value in config.conf.items() if name.startswith("spark.sql."))
    gang = [(name, getattr(config.gang, name)) for name in _RESULTS] if isinstance(config, Gang) else []
    return repr((conf, gang))


def _versions(function: FunctionType) -> str:
    """Return the versions of the installed libraries that a function and the user's functions behind it refer to."""
    packages = {*_ALWAYS, *_packages(function, set())}
    names = {name for package in packages for name in _distributions().get(package, ())}
    return repr(sorted((name, importlib.metadata.version(name)) for name in names))


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _packages(function: FunctionType, seen: set[int]) -> Iterator[str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    for code in _with_nested(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME":
                yield str(step.argval).partition(".")[0]
        for name in code.co_names:
            yield from _packages_of(function.__globals__.get(name), seen)
    for cell in function.__closure__ or ():
        try:
            yield from _packages_of(cell.cell_contents, seen)
        except ValueError:  # The variable has no value yet.
            continue


def _packages_of(value: Any, seen: set[int]) -> Iterator[str]:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(module, str):
        return
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or package in _distributions():
        yield package
    elif isinstance(value, FunctionType):
        yield from _packages(value, seen)
    elif isinstance(value, (type, ModuleType)) and id(value) not in seen:
        seen.add(id(value))
        for member in vars(value).values():
            yield from _packages_of(inspect.unwrap(member) if callable(member) else member, seen)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
