"""The functions and classes that a saved model may name as its maker, and their import (any process)."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from tritium.definitions import ShippedModule
from tritium.errors import BadSetting, ModelError, UntrustedModel

if TYPE_CHECKING:
    from tritium.model.engine import Engine


_saved_checksums: set[str] = set()


def remember_saved(content: bytes) -> None:
    """Let `was_saved_here` know the manifest of a model that this process saves, with the checksums of its files."""
    _saved_checksums.add(hashlib.sha256(content).hexdigest())


def was_saved_here(content: bytes) -> bool:
    """Return whether this process has saved exactly this manifest: then loading runs only code that came from here."""
    return hashlib.sha256(content).hexdigest() in _saved_checksums


@dataclass(frozen=True)
class Trust:
    """The code that loading a model may run: everything, or the functions, classes and modules named."""

    everything: bool
    names: tuple[str, ...]

    @classmethod
    def of(cls, value: Any) -> Trust:
        """Return the trust that `value` expresses: True, False, or names. Raises BadSetting for anything else.

        "package.module:make_net" is one function or class, "package" or "package.module" the modules in it. A string
        may hold several, separated by commas, or "true" or "false".
        """
        if isinstance(value, bool):
            return cls(value, ())
        if isinstance(value, str):
            if value.strip().lower() in ("true", "false", ""):
                return cls(value.strip().lower() == "true", ())
            value = [name.strip() for name in value.split(",")]
        if isinstance(value, Sequence) and all(isinstance(n, str) and _is_name(n) for n in value):
            return cls(False, tuple(value))
        raise BadSetting(
            f"trusted={value!r} should be True, False, or what the model may be made by: "
            "'package.module:make_net', or 'package.module' for every module class in it."
        )

    def of_module(self, name: str, engine: type[Engine]) -> bool:
        """Return whether the model classes of this package or module are trusted as a whole."""
        return any(name == known or name.startswith(f"{known}.") for known in (*engine.trusted, *self.names))


def _is_name(text: str) -> bool:
    home, colon, name = text.partition(":")
    return all(part.isidentifier() for part in [*home.split("."), *(name.split(".") if colon else [])])


def importable(origin: Any) -> str | None:
    """Return "package.module:function" of a function or class that a fresh process can import.

    None when there is no such path: it is in `__main__` or inside a function, or another object has its name.
    """
    if isinstance(origin, str):
        return origin
    home, name = getattr(origin, "__module__", None), getattr(origin, "__qualname__", None)
    if not (inspect.isfunction(origin) or inspect.isclass(origin)) or not home or not name:
        return None
    if home in ("__main__", "__mp_main__") or "<" in name or isinstance(sys.modules.get(home), ShippedModule):
        return None
    try:
        resolved: Any = importlib.import_module(home)
        for part in name.split("."):
            resolved = getattr(resolved, part)
    except (ImportError, AttributeError):
        return None
    return f"{home}:{name}" if resolved is origin else None


def factory(origin: Any, trust: Trust, path: str, engine: type[Engine]) -> Any:
    """Return the function or class that the model of `engine` at `path` names as its origin, imported, not called.

    Raises UntrustedModel, usually before anything is imported, for an origin that `trust` does not cover, and
    ModelError for one that can't be imported or makes no models.
    """
    if not isinstance(origin, str) or ":" not in origin or not _is_name(origin):
        raise ModelError(f"manifest.json of the model at {path!r} names {origin!r}, which is no 'package.module:name'.")
    home, _, name = origin.partition(":")
    exact = trust.everything or origin in trust.names
    if not exact and not trust.of_module(home, engine):
        raise _untrusted(origin, path, "which nobody has named as trusted")
    try:
        maker = _found(origin, name, imported(origin, home, path, anywhere=trust.everything), path, exact)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"The model is made by {origin!r}, which can't be imported here: {error}. Put its package on the path "
            "(PYTHONPATH, or install it), or save the model by value: tr.Model(module, signature, origin=None)."
        ) from error
    if not exact and not (_makes_models(maker, engine) and trust.of_module(maker.__module__, engine)):
        raise _untrusted(origin, path, f"which is no {engine.module_class} and no function declared to return one")
    if not (inspect.isfunction(maker) or _is_model_class(maker, engine)):
        raise ModelError(
            f"The model names {origin!r} as its origin, which is no Python function and no {engine.module_class}."
        )
    return maker


def _found(origin: str, name: str, place: Any, path: str, exact: bool) -> Any:
    """Return the attribute of that name, not through another module unless `exact`: most modules lead to `os`."""
    for depth, part in enumerate(name.split(".")):
        if depth and inspect.ismodule(place) and not exact:
            raise _untrusted(origin, path, f"which leads through the module {place.__name__!r}")
        place = getattr(place, part)
    return place


def imported(origin: str, home: str, path: str, *, anywhere: bool) -> Any:
    """Import the module `home`. Raises UntrustedModel, unless `anywhere`, for one in the current directory.

    A model is often loaded where it was downloaded to, and Python looks there first.
    """
    parts = home.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        if not anywhere and name not in sys.modules and _lies_here(name, parts[:depth]):
            raise _untrusted(
                origin,
                path,
                f"and {name!r} lies in the current directory, {os.getcwd()!r}, which is not searched. If it is your "
                f"own, import it in your program first (import {name})",
            )
        importlib.import_module(name)
    return sys.modules[home]


def _lies_here(name: str, above: Sequence[str]) -> bool:
    """Return whether the current directory holds something that `import name` may take."""
    parent = sys.modules[".".join(above)] if above else None
    if parent is not None and getattr(parent, "__file__", None) is not None:
        return False  # A module in the folder of an imported package belongs to that package.
    try:
        here = os.path.realpath(os.path.join(os.getcwd(), *above))
    except FileNotFoundError:  # The current directory has been removed.
        return False
    entries = sys.path if parent is None else parent.__path__
    searched = any(os.path.realpath(entry or os.curdir) == here for entry in entries)
    return searched and PathFinder.find_spec(name, [here]) is not None


def _makes_models(maker: Any, engine: type[Engine]) -> bool:
    """Return whether `maker` is a class of models, or a function whose annotation says that it returns one."""
    if not inspect.isfunction(maker):
        return _is_model_class(maker, engine)
    try:
        return _is_model_class(typing.get_type_hints(maker).get("return"), engine)
    except Exception:  # noqa: BLE001 - an annotation that can't be evaluated declares nothing
        return False


def _is_model_class(value: Any, engine: type[Engine]) -> bool:
    home, _, name = engine.module_class.rpartition(".")
    return inspect.isclass(value) and issubclass(value, getattr(importlib.import_module(home), name))


def _untrusted(origin: str, path: str, why: str) -> UntrustedModel:
    return UntrustedModel(
        f"The model at {path!r} is made by {origin!r}, {why}. Loading it would import that and call it, with your "
        f"rights. If you know that code, name it: tr.load(path, trusted={origin!r}), or for Spark ML's loaders "
        f"spark.conf.set('spark.tritium.trustModels', {origin!r}).",
        path=path,
        origin=origin,
    )
