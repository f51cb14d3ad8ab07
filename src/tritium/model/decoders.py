"""The functions that decode a model's binary inputs: saved by name or by value, and loaded (any process)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from tritium import ship
from tritium.errors import ModelError, UntrustedModel
from tritium.model import files
from tritium.model.trust import Trust, importable, imported

FILE = "decode.pkl"
Decoders = Mapping[str, Callable[[bytes], Any]]


def saved(decode: Decoders) -> tuple[dict[str, str | None], bytes | None]:
    """Return input → import path, None for a function that has none, and the file with those by value, if any."""
    paths = {name: importable(function) for name, function in decode.items()}
    rest = {name: function for name, function in decode.items() if paths[name] is None}
    return paths, ship.pickle(rest) if rest else None


def load(path: str, manifest: Mapping[str, Any], trust: Trust) -> dict[str, Callable[[bytes], Any]]:
    """Return the functions of the model at `path`.

    Raises UntrustedModel, before anything is imported or unpickled, for those that `trust` does not name, and
    ModelError for one that can't be imported.
    """
    paths: Mapping[str, str | None] = manifest.get("decode", {})
    for name, origin in paths.items():
        if trust.everything or origin in trust.names:
            continue
        what = "a function by value" if origin is None else f"the function {origin!r}"
        fix = "trusted=True" if origin is None else f"trusted={origin!r}"
        raise UntrustedModel(
            f"The model at {path!r} decodes its input {name!r} by {what}, which runs with your rights, on this machine "
            f"and on every executor that scores with it. If you know who made it, say so: tr.load(path, {fix}), or "
            "spark.tritium.trustModels=true for Spark ML's loaders.",
            path=path,
        )
    found: dict[str, Callable[[bytes], Any]] = {}
    if None in paths.values():
        found.update(pickle.loads(bytes(files.read(path, FILE, manifest))))
    for name, origin in paths.items():
        if origin is not None:
            found[name] = _imported(name, origin, path, trust)
    return found


def _imported(name: str, origin: str, path: str, trust: Trust) -> Any:
    home, _, attribute = origin.partition(":")
    try:
        place: Any = imported(origin, home, path, anywhere=trust.everything)
        for part in attribute.split("."):
            place = getattr(place, part)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"The model's input {name!r} is decoded by {origin!r}, which can't be imported here: {error}. Put its "
            "package on the path (PYTHONPATH, or install it)."
        ) from error
    return place
