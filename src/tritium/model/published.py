"""A directory of published models, `1/`, `2/`, …: the newest has the highest number (any process)."""

from __future__ import annotations

from typing import Any

from tritium.errors import BadSetting, ModelError
from tritium.model import files
from tritium.model.model import Model

_CLAIM = ".publishing"


def publish(model: Any, path: str) -> int:
    """Publish a model as the next version in a directory, and return its number, from 1.

    A version is there as a whole or not at all: `path/7/` appears by one rename on a local disk, and counts from the
    moment its manifest is there on an object store. Two that publish at once get two numbers. To roll back, publish the
    earlier version again: `tr.publish("models/bikes/3", "models/bikes")`.

    model : a `tr.Model`, a transformer such as TorchModel, or the path of a saved model, whose files are copied and
            whose code does not run.
    path  : a local path or any fsspec URL; it is made where it does not exist.

    Raises BadSetting for anything else, and ModelError for a saved model that is damaged.
    """
    source = getattr(model, "model", model)
    if not isinstance(source, (Model, str)):
        raise BadSetting(f"publish takes a model, or the path of a saved one, and got {model!r:.100}.", setting="model")
    if isinstance(source, str):
        source = files.located(source)
        files.read_manifest(source)  # Raises for a wrong path, before a number is taken.
    store, root, _ = files.opened(path)
    if store.exists(f"{root}/{files.MANIFEST}"):
        raise BadSetting(
            f"{path!r} is a saved model, and a directory of versions holds 1/, 2/, … Choose another path, and publish "
            f"this model there first: tr.publish({path!r}, …)."
        )
    store.makedirs(root, exist_ok=True)
    number, claim = _claimed(store, root)
    try:
        target = version_path(path, number)
        if isinstance(source, str):
            files.copy(source, target)
        else:
            source.save(target)
    finally:
        store.rm_file(claim)
    return number


def version_path(path: str, number: int) -> str:
    """Return where a version is."""
    return f"{path.rstrip('/')}/{number}"


def versions(path: str) -> list[int]:
    """Return the numbers of the complete versions, the newest first. Raises ModelError where there is no directory."""
    store, root, _ = files.opened(path, shared=True)
    store.invalidate_cache()
    if not store.isdir(root):
        raise ModelError(
            f"No models are published at {path!r}: there is no such directory. tr.publish(model, {path!r}) makes it."
        )
    numbers = (number for name in _names(store, root) if (number := _number(name)))
    return sorted((n for n in numbers if store.exists(f"{root}/{n}/{files.MANIFEST}")), reverse=True)


def _claimed(store: Any, root: str) -> tuple[int, str]:
    """Return the next number, and the file that keeps it from others until the version is complete."""
    store.invalidate_cache()
    number = max((_number(name.removesuffix(_CLAIM)) for name in _names(store, root)), default=0)
    while True:
        number += 1
        claim = f"{root}/{number}{_CLAIM}"
        try:
            with store.open(claim, "xb"):
                pass
        except FileExistsError:
            continue
        except (NotImplementedError, ValueError):  # A store that has no exclusive creation.
            if store.exists(claim):
                continue
            store.pipe_file(claim, b"")
        if not store.exists(f"{root}/{number}"):  # Else another has published it since the names were listed.
            return number, claim
        store.rm_file(claim)


def _names(store: Any, root: str) -> list[str]:
    return [name.rstrip("/").rpartition("/")[2] for name in store.ls(root, detail=False)]


def _number(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() else 0
