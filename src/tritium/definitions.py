"""The user's functions and classes by value, defined in a rank in modules of the same names as on the driver.

cloudpickle alone rebuilds them in no module. Then all that names one by its module fails in a rank (pickle, a process
that multiprocessing spawns), and a module's functions have other globals than the module. So the driver packs where
each is defined, and a rank, and every process that it spawns, makes these modules, `__main__` too.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import typing
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import cloudpickle

SPAWNED = "tritium_spawned"
"""The module that multiprocessing imports as the main one in processes that a rank spawns."""
_FILE = f"{SPAWNED}.pkl"
_SOURCE = f"""
import os
from tritium.definitions import define
globals().update(define(__loader__.get_data(os.path.join(os.path.dirname(__file__), {_FILE!r}))))
"""
_MAIN = ("__main__", "__mp_main__")  # The second is its name in processes that multiprocessing spawns.
_Home: TypeAlias = list[tuple[str, bool, dict[str, Any]]]
"""A module, after its parents: the name of each, whether it goes by value, and its attributes that importing needs."""
_FACTS = ("__package__", "__path__", "__file__", "__doc__")
_OF_THE_FILE = ("__builtins__", "__cached__", "__loader__", "__path__", "__spec__")
_CACHED: Any = type(functools.lru_cache(int))
# Python has the last since 3.11.
_TYPES = (typing.NewType, typing.ParamSpec, getattr(typing, "TypeVarTuple", typing.ParamSpec))


# ---- Packing, on the driver and in a rank


class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which also takes TorchScript, of which torch itself refuses to make a pickle.

    Cached functions, new types and type variables go by value, as functions and classes do.
    """

    def __init__(self, file: io.BytesIO, buffers: Callable[[Any], object] | None = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers)
        self._roots = {*_MAIN, *cloudpickle.list_registry_pickle_by_value()}

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is pickled, as in `pickle.Pickler`."""
        jit = getattr(sys.modules.get("torch"), "jit", None)
        if jit is not None and isinstance(obj, (jit.ScriptModule, jit.ScriptFunction)):
            return self.script(obj)
        if isinstance(obj, _CACHED) and self.takes(obj.__module__):
            return _cached, (obj.cache_parameters(),), obj.__wrapped__, None, None, _set_cached
        if isinstance(obj, _TYPES) and self.takes(obj.__module__):
            supertype = (obj.__supertype__,) if isinstance(obj, typing.NewType) else ()
            return _named_type, (obj.__module__, type(obj), obj.__name__, *supertype)
        return super().reducer_override(obj)

    def script(self, script: Any) -> Any:
        """Return how to make a TorchScript module or function again."""
        return loaded_script, (saved_script(script),)

    def takes(self, module: object) -> bool:
        """Tell whether functions and classes of the module of this name go by value."""
        return isinstance(module, str) and not self._roots.isdisjoint(_lineage(module))


class ForRanks(ByValue):
    """Packs for ranks, in which unpickling puts every function and class into its module."""

    def __init__(self, file: io.BytesIO, check: Callable[[Any], object] | None = None) -> None:
        super().__init__(file)
        self._check = check
        self.packed: dict[int, Any] = {}
        """By id, the modules by value, and the functions and classes that are in one."""
        self._homes: dict[str, _Home] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is pickled, as in `pickle.Pickler`."""
        if self._check is not None:
            self._check(obj)
        if isinstance(obj, ModuleType) and self.takes(obj.__name__):
            self.packed[id(obj)] = obj
            content = {name: value for name, value in vars(obj).items() if name not in _OF_THE_FILE}
            return _module, (self._home(obj.__name__),), content, None, None, _fill
        if isinstance(obj, FunctionType):
            self._share_globals(obj.__globals__)
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and isinstance(obj, type | FunctionType | _CACHED) and self._is_found(obj):
            self.packed[id(obj)] = obj
            make, arguments, state, _, _, set_state = reduced
            state = (set_state, state, self._home(obj.__module__), obj.__qualname__)
            return make, arguments, state, None, None, _define
        return reduced

    def _share_globals(self, scope: dict[str, Any]) -> None:
        """Give a module's functions the module's own dictionary in the rank: cloudpickle looks theirs up here."""
        name = scope.get("__name__")
        if id(scope) not in self.globals_ref and self.takes(name) and _is_globals_of(scope, name):
            self.globals_ref[id(scope)] = _Globals(__name__=name, home=self._home(str(name)))

    def _is_found(self, obj: Any) -> bool:
        """Tell whether it is by value, and in a module; a method is in its class."""
        name, qualname = getattr(obj, "__module__", None), obj.__qualname__
        return self.takes(name) and (isinstance(obj, type) or "." not in qualname) and find(name, qualname) is obj

    def _home(self, name: str) -> _Home:
        if name not in self._homes:  # One list for all that is in the module, so that it is pickled once.
            modules = [(parent, sys.modules[parent]) for parent in _lineage(name) if parent in sys.modules]
            self._homes[name] = [
                (parent, self.takes(parent), {key: vars(module)[key] for key in _FACTS if key in vars(module)})
                for parent, module in modules
            ]
            for *_, facts in self._homes[name]:
                if "__path__" in facts:
                    facts["__path__"] = list(facts["__path__"])  # A folder without __init__.py has an object.
        return self._homes[name]


class FromRank(ByValue):
    """Packs in a rank for the driver or another rank, where objects that came from the driver are known."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is pickled, as in `pickle.Pickler`."""
        if isinstance(obj, ShippedModule):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, type | FunctionType | _CACHED):
            if (known := _shipped.get(id(obj))) is not None:
                return _there, (*known[1:], b"")
            name = getattr(obj, "__module__", None)
            if self.takes(name) and name not in _MAIN and find(name, obj.__qualname__) is obj:
                with io.BytesIO() as file:
                    ByValue(file).dump(obj)
                    return _there, (name, obj.__qualname__, file.getvalue())
        return super().reducer_override(obj)


class _Globals(dict[str, Any]):
    """Stands for the dictionary of a module."""

    def __reduce__(self) -> Any:
        return _globals, (self["home"],)


def find(module: str | None, name: str) -> Any:
    """Return the object of this qualified name in an imported module; None where there is none."""
    place: Any = sys.modules.get(module or "")
    for part in name.split("."):
        place = getattr(place, part, None)
    return place


def _is_globals_of(scope: dict[str, Any], name: object) -> bool:
    module = sys.modules.get(str(name))
    return module is not None and vars(module) is scope


def _lineage(name: str) -> list[str]:
    """Return the names of a module's parents, and then its own."""
    parts = name.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def files_of(definitions: bytes) -> dict[str, bytes]:
    """Return the files of the module SPAWNED, which defines the objects that `ForRanks` has packed."""
    return {f"{SPAWNED}.py": _SOURCE.encode(), _FILE: definitions}


def saved_script(script: Any) -> bytes:
    """Return TorchScript as the bytes of a file of torch's own."""
    import torch

    out = io.BytesIO()
    with warnings.catch_warnings():  # Torch 2.13 advises torch.export, which would trace the module again.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(script, out)
    return out.getvalue()


def loaded_script(saved: bytes) -> Any:
    """Return the TorchScript module of `saved_script`; that of a function is called as the function was."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]


# ---- Unpacking, in a rank and in the processes that it spawns

_modules: dict[str, ShippedModule] = {}
_imported: dict[str, ModuleType] = {}
"""Modules that were executed from their files, as they were asked for an object that did not travel."""
_shipped: dict[int, tuple[Any, str, str]] = {}
"""By id, the functions and classes from the driver: each itself, the name of its module, and its qualified name."""


class ShippedModule(ModuleType):
    """A module from the driver, with the objects that the user's function needs; its file, if it is here, has the rest.

    It has the spec of that file, by which Python finds submodules and data.
    """

    def __getattr__(self, name: str) -> Any:
        """Return an object that did not travel."""
        spec = self.__spec__
        if not name.startswith("__") and spec is not None and _may_hold(spec, name):
            if (imported := _imported.get(self.__name__)) is None:
                imported = _imported[self.__name__] = module_from_spec(spec)
                spec.loader.exec_module(imported)  # type: ignore[union-attr]  # `_may_hold` has seen one.
            if name in vars(imported):
                return vars(imported)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)


def _may_hold(spec: ModuleSpec, name: str) -> bool:
    """Tell whether a module's file names it. Pickle asks every module for an object without one, and must run none."""
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, InspectLoader) else None
    return code is not None and (name in code.co_names or ("*",) in code.co_consts)


class _SpawnedMain(ModuleType):
    """The current main module under its name in spawned processes, whose objects come back by it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(sys.modules["__main__"], name)


def load(job: bytes) -> Any:
    """Return the object that `ForRanks` has packed, after replacing this process's main module by the driver's."""
    main = sys.modules["__main__"] = _modules["__main__"] = ShippedModule("__main__")
    sys.modules["__mp_main__"] = _SpawnedMain("__mp_main__")
    result = pickle.loads(job)
    if find_spec(SPAWNED) is not None:
        main.__spec__ = ModuleSpec(SPAWNED, None)  # Processes that multiprocessing spawns import it.
    return result


def define(definitions: bytes) -> dict[str, Any]:
    """Make the modules in a process that a rank has spawned, and return the content of the main one."""
    load(definitions)
    own_facts = ("__name__", "__package__", *_OF_THE_FILE)
    return {name: value for name, value in vars(_modules["__main__"]).items() if name not in own_facts}


def _module(home: _Home) -> ModuleType:
    module: ModuleType | None = None
    for name, by_value, facts in home:
        name = "__main__" if name in _MAIN else name
        above, module = module, _modules.get(name)
        if module is None and not by_value:
            with suppress(ImportError):
                module = importlib.import_module(name)
        if module is None:
            module = _new_module(name, facts, above)
    assert module is not None
    return module


def _new_module(name: str, facts: dict[str, Any], above: ModuleType | None) -> ShippedModule:
    module = _modules[name] = ShippedModule(name)
    vars(module).update(facts)
    path = getattr(above, "__path__", None)
    finders = [] if above is not None and path is None else sys.meta_path
    spec = next((spec for finder in finders if (spec := finder.find_spec(name, path)) is not None), None)
    if spec is not None:
        module.__spec__, module.__loader__ = spec, spec.loader
        if spec.submodule_search_locations is not None:
            module.__path__ = list(spec.submodule_search_locations)
    if name not in sys.modules:  # Another module of that name is left, as its code may go on to import it.
        sys.modules[name] = module
        if above is not None:
            setattr(above, name.rpartition(".")[2], module)
    return module


def _globals(home: _Home) -> dict[str, Any]:
    return vars(_module(home))


def _fill(module: ModuleType, content: dict[str, Any]) -> None:
    vars(module).update(content)


def _define(obj: Any, state: tuple[Callable[[Any, Any], object], Any, _Home, str]) -> None:
    """Give a function or class its state, and its place in its module."""
    set_state, content, home, qualname = state
    set_state(obj, content)
    if obj.__qualname__ != qualname:  # Of a class within a class cloudpickle keeps only the last part.
        obj.__qualname__ = qualname
    place: Any = _module(home)
    _shipped[id(obj)] = obj, place.__name__, qualname
    *outer, name = qualname.split(".")
    for part in outer:
        if part not in vars(place):  # The class around it does not travel, or is defined later.
            setattr(place, part, type(part, (), {"__module__": obj.__module__}))
        place = vars(place)[part]
    if vars(place).get(name) is not obj:
        setattr(place, name, obj)


def _there(module: str, name: str, otherwise: bytes) -> Any:
    if (known := find(module, name)) is not None:
        return known
    if otherwise:
        return pickle.loads(otherwise)
    raise AttributeError(f"There is no {name!r} in {module!r} any more.")


def _cached(parameters: dict[str, Any]) -> Any:
    """Return a cached function whose function comes later, as it may call itself, by `_set_cached`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return vars(call)["function"](*args, **kwargs)

    return functools.lru_cache(**parameters)(call)


def _set_cached(cached: Any, function: Callable[..., Any]) -> None:
    vars(cached.__wrapped__)["function"] = function
    functools.update_wrapper(cached, function)


def _named_type(module: str, kind: Any, *arguments: Any) -> Any:
    new_type = kind(*arguments)
    new_type.__module__ = module
    return new_type
