"""Give this process the environment of a rank for the length of a block, for `on="here"` (driver)."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from tritium import ship
from tritium.frameworks import torch as pytorch
from tritium.frameworks.ports import reserved_port
from tritium.gang.rank.environment import prepare_environment
from tritium.gang.rank.world import World
from tritium.gang.settings import Gang
from tritium.gang.supervisor.process import THREADS


@contextmanager
def surrounded(gang: Gang, world: World) -> Iterator[None]:
    """Set the variables of `gang.env` and torchrun's, and apply `py_files` and `cpus`, within the block.

    At its end, restore every variable, remove modules of the `py_files` from `sys.modules`, and destroy a process group
    that was made in the block, so that the next launch can make one. Raises BadSetting for unusable `py_files`.
    """
    with (
        reserved_port() as port,
        _variables(gang, world, port),
        _importable(gang.py_files),
        pytorch.threads(gang.cpus),  # OpenMP reads its variables only when torch is imported.
        _process_group(),
    ):
        yield


@contextmanager
def _variables(gang: Gang, world: World, port: socket.socket) -> Iterator[None]:
    before = dict(os.environ)
    changed: list[str] = []
    try:
        try:
            if gang.cpus is not None:
                os.environ.update(dict.fromkeys(THREADS, str(gang.cpus)))
            os.environ.update(gang.env)
            place = {"master_port": port.getsockname()[1], "visible": []}
            prepare_environment(world, place)
        finally:
            changed += [name for name, value in os.environ.items() if before.get(name) != value]
        yield
    finally:
        for name in changed:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


@contextmanager
def _process_group() -> Iterator[None]:
    users_own = _has_group()
    try:
        yield
    finally:
        if _has_group() and not users_own:
            sys.modules["torch.distributed"].destroy_process_group()


def _has_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


@contextmanager
def _importable(paths: Sequence[str]) -> Iterator[None]:
    """Make `py_files` importable from where they are, so that breakpoints in them work."""
    if not paths:
        yield
        return
    files = {
        path.stem: path for path in map(Path, map(os.path.abspath, paths)) if path.is_dir() or path.suffix == ".py"
    }
    zips = [os.path.abspath(path) for path in paths if os.fspath(path).endswith((".zip", ".egg"))]
    ship.archive(paths)  # Raises BadSetting for a path that is no Python file, package or zip.
    finder, before = _Files(files), set(sys.modules)
    sys.meta_path.insert(0, finder)
    sys.path[:0] = zips
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = [entry for entry in sys.path if entry not in zips]
        for path in zips:
            sys.path_importer_cache.pop(path, None)
        for name in set(sys.modules) - before:
            if _is_below(sys.modules[name], [*map(str, files.values()), *zips]):
                del sys.modules[name]
        importlib.invalidate_caches()


def _is_below(module: ModuleType, paths: Sequence[str]) -> bool:
    facts = getattr(module, "__dict__", {})  # Read from there, as torch.classes has any attribute that it is asked for.
    places = [facts.get("__file__") or "", *(facts.get("__path__") or ())]
    return any(place == path or str(place).startswith(path + os.sep) for place in places for path in paths)


class _Files(MetaPathFinder):
    """Imports single files and packages by their names."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None or path is not None:
            return None
        if not file.is_dir():
            return spec_from_file_location(fullname, file)
        if (file / "__init__.py").is_file():
            return spec_from_file_location(fullname, file / "__init__.py", submodule_search_locations=[str(file)])
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(file)]
        return spec
