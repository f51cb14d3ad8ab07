"""The package and the user's code on the way to executors (driver packs, supervisor and rank process mount).

Only the driver needs Tritium installed. An executor receives a small function, pickled by value, that carries the
package as a zip (package.py), puts it on `sys.path` without writing to a disk, and calls one of its functions by name.
"""

from __future__ import annotations

import functools
import hashlib
import io
import operator
import os
import pathlib
import sys
import sysconfig
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, ModuleType
from typing import Any

import cloudpickle

from tritium import package
from tritium.definitions import ByValue, ForRanks, FromRank, ShippedModule, files_of
from tritium.errors import BadSetting


def home() -> str:
    """Return the path of this package for a child process: the mounted zip, or the directory it is installed in."""
    mounted: tuple[str, ...] = getattr(sys, "_tritium", ())
    return mounted[0] if mounted else str(pathlib.Path(__file__).parents[1])


def importable() -> list[str]:
    """Return `sys.path` without this package's zip, with what Spark has added to it (`addPyFile`, artifacts)."""
    mounted: tuple[str, ...] = getattr(sys, "_tritium", ())
    entries = (entry for entry in sys.path if isinstance(entry, str))  # Python ignores other types, such as Path.
    return [entry for entry in entries if entry not in mounted and "tritium-mount" not in entry]


def import_from(path: Sequence[str]) -> None:
    """Add the missing entries of another process's `importable()`, before installed packages, as Spark does."""
    begin = sum(1 for entry in sys.path[:2] if entry in ("", home()))
    sys.path[begin:begin] = [entry for entry in path if entry not in sys.path]


class Mount:
    """A zip as a path for `sys.path`: in memory where the system can, else in a temporary file."""

    def __init__(self, archive: bytes) -> None:
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("tritium-user-code")
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self._fd, self.path = tempfile.mkstemp(".zip", "tritium-mount-")
        with os.fdopen(os.dup(self._fd), "wb") as file:
            file.write(archive)

    def close(self) -> None:
        """Free the memory, or remove the file."""
        os.close(self._fd)
        if not self.path.startswith("/proc/"):
            os.unlink(self.path)


def digest(archive: bytes) -> str:
    """Return a hash of the content: two zips with the same digest are the same code."""
    return hashlib.sha256(archive).hexdigest()[:16]


def entry(target: str, payload: bytes, annotations: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return a function for Spark that calls `target(payload, *args)` where Tritium may not be installed.

    target      : "module:function" within this package.
    annotations : those of the returned function, for Spark's UDFs, which read them.

    Another version of Tritium in a reused Python worker is replaced by this one.
    """
    archive = package.zipped()
    name = digest(archive)
    ours = package.OURS

    def call(*args: Any) -> Any:  # It is pickled by value, so it imports all that it needs.
        import importlib
        import os
        import sys
        import tempfile

        if getattr(sys.modules.get("tritium"), "__digest__", None) != name:
            for module in [m for m in sys.modules if m.partition(".")[0] in ours]:
                del sys.modules[module]
            try:
                import lzma
            except ImportError as error:
                raise ImportError(f"{sys.executable} was built without lzma, which Tritium needs: {error}") from error
            sys.path[:] = [p for p in sys.path if "tritium-mount" not in p and p not in getattr(sys, "_tritium", ())]
            if hasattr(os, "memfd_create"):
                handle = os.memfd_create(f"tritium-{name}")
                path = f"/proc/{os.getpid()}/fd/{handle}"
            else:
                handle, path = tempfile.mkstemp(".zip", "tritium-mount-")
                # Spark ends its workers with os._exit or SIGKILL, which run no exit handler. The pipe stays open while
                # this process lives; then a shell removes the file. Spark's daemon sends SIGHUP to its own group.
                end, _ = os.pipe()
                remove = ["sh", "-c", 'read _; rm -f "$0"', path]
                os.posix_spawn("/bin/sh", remove, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, end, 0)], setpgroup=0)
                os.close(end)
            with os.fdopen(os.dup(handle), "wb") as file:
                file.write(lzma.decompress(archive))
            sys.path.insert(0, path)
            sys._tritium = (path,)  # type: ignore[attr-defined]
            importlib.invalidate_caches()
            mounted = importlib.import_module("tritium")
            mounted.__digest__ = name  # type: ignore[attr-defined]
            mounted.__archive__ = archive  # type: ignore[attr-defined]
        module, _, function = target.partition(":")
        return getattr(importlib.import_module(module), function)(payload, *args)

    call.__module__ = "__main__"  # Cloudpickle takes functions of __main__ by value.
    call.__qualname__ = call.__name__ = target.rpartition(":")[2]
    call.__annotations__ = dict(annotations or {})
    return call


def pickle(obj: Any, by_reference: Sequence[str] = (), buffers: Callable[[Any], object] | None = None) -> bytes:
    """Return `obj` as bytes, with the user's own modules by value, so that executors need not have them.

    by_reference : paths (the user's `py_files`) below which modules stay references.
    buffers      : takes the memory of arrays, which is then not among the bytes: see `pickle.PickleBuffer`.

    Unpickling needs cloudpickle, which is in the same zip as this package.
    """
    with by_value(by_reference), io.BytesIO() as file:
        ByValue(file, buffers).dump(obj)
        return file.getvalue()


def pickle_for_ranks(
    job: Any, by_reference: Sequence[str] = (), check: Callable[[Any], object] | None = None
) -> tuple[bytes, list[Any]]:
    """Return `job` as bytes for `definitions.load`, and the user's modules, functions and classes that it defines.

    by_reference : as of `pickle`.
    check        : called with everything in `job` that is no plain value or container; it may raise.
    """
    with by_value(by_reference), io.BytesIO() as file:
        pickler = ForRanks(file, check)
        pickler.dump(job)
        return file.getvalue(), list(pickler.packed.values())


def files_of_spawned(defined: Sequence[Any], by_reference: Sequence[str] = ()) -> dict[str, bytes]:
    """Return the files by which processes that a rank spawns define the same; none over LARGEST_DEFINITIONS."""
    packed, _ = pickle_for_ranks(list(defined), by_reference)
    return files_of(packed) if defined and len(packed) <= LARGEST_DEFINITIONS else {}


def pickle_from_rank(obj: Any) -> bytes:
    """Return `obj` as bytes for the driver or another rank, which use their own of the user's functions and classes."""
    with by_value(), io.BytesIO() as file:
        FromRank(file).dump(obj)
        return file.getvalue()


@contextmanager
def by_value(by_reference: Sequence[str] = ()) -> Iterator[None]:
    """Make cloudpickle, in this block, take the user's own modules by value, except those below `by_reference`."""
    roots = tuple(os.path.abspath(p) for p in by_reference)
    with _registry:  # Cloudpickle's list is global, and one launch must not remove entries that another relies on.
        already = set(cloudpickle.list_registry_pickle_by_value())
        users_own = {m.__name__: m for m in _not_installed() if is_users_own(m, roots)}  # The main one has two names.
        modules = [module for name, module in users_own.items() if name not in already]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


LARGEST_DEFINITIONS = 64 << 20
"""Bytes. They travel beside the job once more, for processes that few ranks spawn."""
_registry = threading.RLock()
_installed: dict[str, ModuleType] = {}  # With torch some 2,000 modules are installed ones: each is examined once.


_last: tuple[list[ModuleType], list[ModuleType]] = ([], [])
"""All modules at the last search, and its result."""


def _not_installed() -> list[ModuleType]:
    """Return the imported modules without most of those that are installed. The caller holds `_registry`."""
    global _last
    now = list(sys.modules.values())
    then, result = _last
    if len(then) != len(now) or not all(map(operator.is_, then, now)):  # 0.3 ms for 8,000 modules; a search takes 4.
        result = _search()
        _last = now, result
    return result


def _search() -> list[ModuleType]:
    not_installed = []
    for name in list(sys.modules):  # Not by items(), as Python collects garbage after 700 tuples.
        if (module := sys.modules.get(name)) is None or _installed.get(name) is module:
            continue
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_installed(file):
            _installed[name] = module
        else:
            not_installed.append(module)
    return not_installed


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    paths = [sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({root + os.sep for path in paths if path for root in (path, os.path.realpath(path))})


def is_users_own(module: ModuleType, by_reference: tuple[str, ...]) -> bool:
    """Return whether to pickle the module by value: it is neither installed nor below a path of `by_reference`."""
    if isinstance(module, ShippedModule):
        return module.__name__ != "__main__"
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or is_installed(file):  # Most of some 2,000 modules, so it must be quick.
        return False
    name = getattr(module, "__name__", None)
    if not isinstance(name, str) or name == "__main__":  # Cloudpickle always takes it by value.
        return False
    if name.partition(".")[0] in (*package.OURS, "pyspark") or sys.modules.get(name) is not module:
        return False
    return not any(os.path.abspath(file).startswith(root) for root in by_reference)


@functools.cache
def is_installed(file: str) -> bool:
    """Return whether the file, or the target of its link, is of Python or an installed package, or no source."""
    # Links are resolved only where it matters, as for some 2,000 modules it takes each rank 0.1 s at its end.
    # Python makes names of files absolute: a relative one is of a module of torch's without a file.
    if not file.endswith(".py") or not os.path.isabs(file):
        return True
    return _among_installed(file) or _among_installed(os.path.realpath(file))


def _among_installed(file: str) -> bool:
    inside = ("site-packages" + os.sep, "dist-packages" + os.sep)
    if file.startswith(_installed_roots()) or any(part in file for part in inside):
        return True
    roots = [os.path.join(path, "") for path in sys.path if path]
    return any(file[len(root) :].split(os.sep)[0] in _targets(root) for root in roots if file.startswith(root))


@functools.cache
def _targets(root: str) -> frozenset[str]:
    """Return the files and packages that `pip install --target` installed in a folder of `sys.path`."""
    records = pathlib.Path(root).glob("*.dist-info/RECORD")
    lines = (line for record in records for line in record.read_text(encoding="utf-8").splitlines())
    return frozenset(line.partition("/")[0].partition(",")[0] for line in lines)


def archive(paths: Sequence[str], more: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    """Return the user's `py_files` as one zip: files and packages at its top, the content of zips unchanged.

    more : name → content of further files at its top.

    Raises BadSetting for a path that is none of these.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for name, content in more.items():
            target.writestr(name, content)
        for path in map(pathlib.Path, paths):
            if path.is_dir():
                for file in sorted(path.rglob("*.py")):
                    target.write(file, file.relative_to(path.parent))
            elif path.suffix in (".zip", ".egg") and path.is_file():
                with zipfile.ZipFile(path) as source:
                    for item in source.infolist():
                        target.writestr(item, source.read(item))
            elif path.suffix == ".py" and path.is_file():
                target.write(path, path.name)
            else:
                raise BadSetting(
                    f"py_files: {str(path)!r} is no Python file, package directory or zip.", path=str(path)
                )
    return out.getvalue()
