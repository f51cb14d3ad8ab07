"""Call a function when a module is imported, wherever that happens (rank)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def at_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` once: now if it is imported, else right after its import, before its names are used."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # only now: find_spec may be called to check an installation
                    sys.meta_path.remove(self)
                    self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
