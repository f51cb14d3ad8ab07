"""This package as a zip of bytecode, which travels to executors (driver; made once, and kept for later processes)."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.resources
import importlib.util
import io
import lzma
import marshal
import os
import pathlib
import sys
import tempfile
import threading
import zipfile
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

CACHE = "TRITIUM_CACHE"
"""The environment variable with the directory for zips; "": none is kept."""
_KEPT = 8  # Several versions of Tritium and of Python, with and without `tritium_compat`, have a zip each.
_STAMP = (2020, 1, 1, 0, 0, 0)  # One date for all, so that the same sources always make the same zip.
# With contexts by the byte before (lc) and none by the place in a word (pb), it is 0.4 % smaller at no cost.
_LZMA = {"id": lzma.FILTER_LZMA2, "preset": 2, "lc": 4, "lp": 0, "pb": 0}

_COMPAT = "tritium_compat"
_in_use: set[str] = set()  # A package that has travelled once always goes along, so that Python workers can be reused.

# Python 3.11 counts the depth of syntax trees for all threads together, and two that make one at the same time fail:
# "SystemError: AST constructor recursion depth mismatch", seen in the first launches of two threads.
SYNTAX_TREES = threading.Lock()


def compat_in_use(code: Collection[bytes] = ()) -> bool:
    """Return whether `tritium_compat` goes along to the ranks: it does where somebody has imported it.

    code : the user's code, pickled or packed, which contains the names of the modules that it imports.
    """
    if _COMPAT in sys.modules or any(name in part for part in code for name in (b"tritium.compat", _COMPAT.encode())):
        _in_use.add(_COMPAT)
    return bool(_in_use) and importlib.util.find_spec(_COMPAT) is not None


def zipped(compat: bool = False) -> bytes:
    """Return this package and cloudpickle as a compressed zip of bytecode, without sources, docstrings and annotations.

    compat : whether `tritium_compat` goes along, see `compat_in_use`.

    It is compressed as a whole, by LZMA: four fifths of what zlib takes, in the same time, and unpacked in 35 ms, once
    in a worker of Spark's.

    Driver and executors run the same version of Python, or Spark refuses the job. From 1000 KiB on, Spark would warn at
    each launch that it broadcasts a large task: so docstrings, the annotations of functions and the columns of
    instructions (a third of it all), which nothing reads there, asserts, what only the driver's shell needs
    (`tritium.cli`), and other libraries' names that nobody uses (`tritium_compat`) are left out. cloudpickle is
    included because executors may lack it, or have another version than the one that pickled here.

    To make it takes 1 to 3 s. It is kept for other processes of this user with the same sources, in the directory
    `$TRITIUM_CACHE`, or else `tritium` in the user's directory for caches.
    """
    with SYNTAX_TREES:  # So, too, one of several threads makes it for all.
        return _zipped(compat)


@functools.cache
def _zipped(compat: bool) -> bytes:
    if (mounted := getattr(sys.modules["tritium"], "__archive__", None)) is not None:
        return bytes(mounted)
    sources = dict(_sources("tritium", "cloudpickle", *([_COMPAT] if compat else [])))
    key = _key(sources)
    if (kept := _kept(key)) is not None:
        return kept
    compressed = lzma.compress(_compiled(sources), filters=[_LZMA])
    _keep(key, compressed)
    return compressed


def _compiled(sources: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, source in sources.items():
            code = compile(_without_texts(ast.parse(source)), name, "exec", dont_inherit=True, optimize=1)
            header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
            archive.writestr(zipfile.ZipInfo(name + "c", _STAMP), header + marshal.dumps(code), zipfile.ZIP_STORED)
    return out.getvalue()


def _without_texts(tree: ast.Module) -> ast.Module:
    """Remove docstrings, columns, and the annotations of functions (those of dataclasses' fields are read)."""
    for node in ast.walk(tree):
        # Only tracebacks that mark the source need columns.
        if isinstance(node, ast.expr | ast.stmt | ast.excepthandler):
            node.end_lineno, node.col_offset, node.end_col_offset = node.lineno, 0, 0
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            first = node.body[0]
            node.body[:1] = [] if len(node.body) > 1 else [ast.copy_location(ast.Pass(), first)]
    return tree


def _sources(*packages: str) -> Iterator[tuple[str, bytes]]:
    def walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
        for item in sorted(folder.iterdir(), key=lambda i: i.name):
            if item.is_dir() and item.name not in ("__pycache__", "cli"):
                yield from walk(item, f"{prefix}/{item.name}")
            elif item.name.endswith(".py"):
                yield f"{prefix}/{item.name}", item.read_bytes()

    for package in packages:
        yield from walk(importlib.resources.files(package), package)


# --- Kept for the next process


def _directory() -> pathlib.Path | None:
    if os.name != "posix":  # Elsewhere it can't be seen who has written a file.
        return None
    if (chosen := os.environ.get(CACHE)) is not None:
        return pathlib.Path(chosen).absolute() if chosen else None
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(caches, "tritium") if os.path.isabs(caches) else None  # There may be no home.


def _key(sources: dict[str, bytes]) -> str:
    """Return a hash of the sources, which decide the content of the zip: this file, which makes it, is one of them."""
    hashed = hashlib.sha256(f"{sys.version}\0{sys.implementation.cache_tag}".encode())
    for name, source in sources.items():
        hashed.update(f"\0{name}\0{len(source)}\0".encode())
        hashed.update(source)
    return hashed.hexdigest()


def _kept(key: str) -> bytes | None:
    """Return the zip that an earlier process kept, if it is whole, and only this user can have written it."""
    if (directory := _directory()) is None:
        return None
    try:
        with open(directory / f"{key}.xz", "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read()
    except OSError:
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        return None  # Its content runs on executors.
    digest, archive = content[:32], content[32:]
    return archive if hashlib.sha256(archive).digest() == digest else None


def _keep(key: str, archive: bytes) -> None:
    if (directory := _directory()) is None:
        return
    with contextlib.suppress(OSError):  # If the disk is full or read-only, the next process makes it again.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(".part", dir=directory)  # Only this user can read it.
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(archive).digest() + archive)
            os.replace(path, directory / f"{key}.xz")
        except OSError:
            os.unlink(path)
            raise
        for old in sorted(directory.glob("*.xz"), key=os.path.getmtime)[:-_KEPT]:
            old.unlink()
