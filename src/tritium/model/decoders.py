"""The functions that a model applies to its inputs: saved by name or by value, and loaded (any process)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from tritium import ship
from tritium.errors import ModelError, UntrustedModel
from tritium.model import files
from tritium.model.trust import Trust, importable, imported

Functions = Mapping[str, Callable[..., Any]]
FILES = {"decode": "decode.pkl", "transform": "transform.pkl"}
"""Kind of function → the file of the functions saved by value. In the manifest the kind is the key of import paths."""
_INPUTS = "inputs"


def of_model(decode: Functions, transform: Callable[..., Any] | None) -> dict[str, Functions]:
    """Return a model's functions by kind and name. A function that decodes has the name of its input."""
    return {"decode": decode, "transform": {} if transform is None else {_INPUTS: transform}}


def saved(functions: Functions) -> tuple[dict[str, str | None], bytes | None]:
    """Return name → import path, and the pickled functions without one (path None); None if all have one."""
    paths = {name: importable(function) for name, function in functions.items()}
    rest = {name: function for name, function in functions.items() if paths[name] is None}
    return paths, ship.pickle(rest) if rest else None


def load(path: str, manifest: Mapping[str, Any], trust: Trust) -> dict[str, Callable[[Any], Any]]:
    """Return the functions that decode the inputs of the model at `path`.

    Raises UntrustedModel, before anything is imported or unpickled, for a function that `trust` does not name, and
    ModelError for one that can't be imported.
    """
    return _load("decode", path, manifest, trust, "decodes its input {!r} by")


def load_transform(path: str, manifest: Mapping[str, Any], trust: Trust) -> Callable[..., Any] | None:
    """Return the transform of the model at `path`, or None. Raises as `load` does."""
    return _load("transform", path, manifest, trust, "transforms its {} by").get(_INPUTS)


def _load(kind: str, path: str, manifest: Mapping[str, Any], trust: Trust, does: str) -> dict[str, Callable[..., Any]]:
    paths: Mapping[str, str | None] = manifest.get(kind) or {}
    for name, origin in paths.items():
        if trust.everything or origin in trust.names:
            continue
        what = "a function by value" if origin is None else f"the function {origin!r}"
        fix = "trusted=True" if origin is None else f"trusted={origin!r}"
        raise UntrustedModel(
            f"The model at {path!r} {does.format(name)} {what}, which runs with your rights, on this machine "
            f"and on every executor that scores with it. If you know who made it, say so: tr.load(path, {fix}), or "
            "spark.tritium.trustModels=true for Spark ML's loaders.",
            path=path,
        )
    functions: dict[str, Callable[..., Any]] = {}
    if None in paths.values():
        functions.update(pickle.loads(bytes(files.read(path, FILES[kind], manifest))))
    for name, origin in paths.items():
        if origin is not None:
            functions[name] = _imported(f"The model {does.format(name)} {origin!r}", origin, path, trust)
    return functions


def _imported(use: str, origin: str, path: str, trust: Trust) -> Any:
    home, _, attribute = origin.partition(":")
    try:
        place: Any = imported(origin, home, path, anywhere=trust.everything)
        for part in attribute.split("."):
            place = getattr(place, part)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{use}, which can't be imported here: {error}. Put its package on the path (PYTHONPATH, or install it)."
        ) from error
    return place
