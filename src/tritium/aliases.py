"""Packages whose names stand for modules of `tritium_compat` where they are not installed (any process).

`tritium.compat` adds them on the driver, itself among them. Every rank adds the same ones before it imports anything of
the user's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_active: dict[str, str] = {}


def active() -> dict[str, str]:
    """Return package -> the module that it stands for."""
    return dict(_active)


def installed(package: str) -> str | None:
    """Return the file of an installed package; None where it is not installed. A folder without code is none."""
    spec = PathFinder.find_spec(package)
    return None if spec is None else spec.origin  # A folder has no origin.


def add(aliases: Mapping[str, str]) -> None:
    """Let `import package` import the module that it stands for, unless the package is installed.

    aliases : package, or module of Tritium's (`tritium.compat`) -> the module that it stands for.
    """
    _active.update({name: module for name, module in aliases.items() if "." in name or installed(name) is None})
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder())  # First, or the search of the parent's path would load a second copy.


class _AliasFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = next((name for name in _active if f"{fullname}.".startswith(f"{name}.")), None)
        if package is None:
            return None
        real = importlib.util.find_spec(_active[package] + fullname.removeprefix(package))
        if real is None:
            return None
        return ModuleSpec(fullname, _Alias(real), is_package=real.submodule_search_locations is not None)


class _Alias(Loader):
    """Gives the module itself, which then has two names in `sys.modules`."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._spec.name)
        self._spec = module.__spec__ or self._spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # Importing it under another name has replaced it.
