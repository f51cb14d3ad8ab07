"""A directory of published models, `1/`, `2/`, …: the newest has the highest number (any process)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from tritium.errors import BadSetting, ModelError
from tritium.model import files, registry
from tritium.model.model import Model

_CLAIM = ".publishing"


def publish(model: Any, path: str, *, keep: int | None = None) -> int:
    """Publish a model as the next version in a directory, and return its number, from 1.

    A version is there as a whole or not at all: `path/7/` appears by one rename on a local disk, and counts from the
    moment its manifest is there on an object store. Two that publish at once get two numbers. To roll back, publish the
    earlier version again: `tr.publish("models/bikes/3", "models/bikes")`.

    model : a `tr.Model`, a transformer such as TorchModel, or the path of a saved model, whose files are copied and
            whose code does not run.
    path  : a local path or any fsspec URL; it is made where it does not exist.
    keep  : how many versions stay, the new one included; older ones are removed. No running query needs them: each has
            a copy of the version that it uses. None: all stay.

    Raises BadSetting for anything else, and ModelError for a saved model that is damaged.
    """
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise BadSetting(
            f"keep={keep!r}: give the number of versions that stay, from 1, or None for all.", setting="keep"
        )
    if registry.is_registered(path):
        raise BadSetting(
            f"publish fills a directory, and {path!r} is in MLflow's registry: tritium.mlflow.log_model(model) with "
            "the name of the registered model adds a version there.",
            setting="path",
        )
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
    if keep is not None:
        _remove_before(path, keep)
    return number


def _remove_before(path: str, keep: int) -> None:
    """Remove the versions before the newest `keep`, and what an earlier removal that was killed has left."""
    store, root, local = files.opened(path)
    newest = versions(path)[:keep]
    store.invalidate_cache()
    names = set(_names(store, root))
    for number in sorted(n for n in map(_number, names) if 0 < n < newest[-1] and f"{n}{_CLAIM}" not in names):
        # The manifest first: without it there is no version, whatever else is left.
        for file in (f"{root}/{number}/{files.MANIFEST}", f"{root}/{number}"):
            with contextlib.suppress(FileNotFoundError):  # Another process removes it, too.
                files.remove(store, local, file, recursive=file.endswith(f"/{number}"))


def version_path(path: str, number: int) -> str:
    """Return where a version is."""
    return f"{path.rstrip('/')}/{number}"


def local_copy(path: str, number: int) -> AbstractContextManager[str]:
    """Return the directory of a version, within a block: of MLflow's registry, that of a copy."""
    if registry.is_registered(path):
        return registry.downloaded(registry.uri_of(path, number))
    return contextlib.nullcontext(version_path(path, number))


def versions(path: str) -> list[int]:
    """Return the numbers of the complete versions, the newest first; of an alias in MLflow's registry the one it names.

    Raises ModelError where there is no directory, and MlflowException where there is no such alias.
    """
    if registry.is_registered(path):
        return [registry.version_of(path)]
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
