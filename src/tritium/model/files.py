"""A model as a directory, here or on any fsspec file system (any process).

    model.safetensors   the weights
    signature.json      columns, dtypes, shapes
    history.json        losses and metrics of its training
    module.pkl          the module's code by value; only where it has no import path
    decode.pkl          the functions that decode binary columns by value; only where they have no import path
    transform.pkl       the function on the inputs by value; only where there is one without an import path
    manifest.json       engine, versions, the import path, size and SHA-256 of every other file; written last

A new directory on a local disk appears by one rename. On an object store the manifest is written last: without it
there is no model, and files that do not match it are refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from tritium import file_system
from tritium.errors import BadSetting, ModelError
from tritium.model.forms import FILE, ORIGIN, TEXT, WHOLE, check, having, mapping_of, optional, parsed
from tritium.model.trust import remember_saved, was_saved_here

MANIFEST = "manifest.json"
_FORMAT = 1
FILES = mapping_of(having(bytes=WHOLE, sha256=TEXT), FILE)
"""The form of the files that a manifest lists: none lies elsewhere, as a copy of the model would write it there."""
_FORMS = {
    "files": FILES,
    "module": having(**{"import": optional(TEXT), "by value": optional(TEXT), "seed": optional(WHOLE)}),
    "decode": optional(mapping_of(optional(ORIGIN))),
    "transform": optional(mapping_of(optional(ORIGIN))),
}
_EVER = ("model.safetensors", "signature.json", "history.json", "module.pkl", "decode.pkl", "transform.pkl")
_CHUNK = 16 << 20


def save(
    path: str,
    contents: Mapping[str, Iterable[bytes | memoryview]],
    facts: Mapping[str, Any],
    *,
    overwrite: bool,
) -> None:
    """Write every file of `contents` and a manifest with `facts`.

    A crash leaves either the old model or the new one, with two exceptions. On an object store an overwritten model is
    removed first, and a crash leaves files without a manifest, which `load` refuses. Where the system can't exchange
    two directories (`renameat2` of Linux), a crash between two renames leaves both models beside `path`.
    Raises BadSetting if `path` exists, without `overwrite` or with other files than a model's.
    """
    files, root, local = opened(path)
    if _exists(files, root):
        if not overwrite:
            raise BadSetting(f"There is something at {path!r} already. Choose another path, or overwrite=True.")
        _refuse_other_files(files, root, path, {MANIFEST, *_EVER, *contents})
    if not local:
        if _exists(files, root):
            remove(files, local, root)
        _write(files, local, root, contents, facts)
        return
    beside = f"{root}.{uuid.uuid4().hex[:8]}.part"
    try:
        _write(files, local, beside, contents, facts)
        _move(beside, root)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def copy(source: str, target: str) -> None:
    """Copy the model at `source` to a new directory, file by file, each compared with its checksum."""
    manifest, _ = read_manifest(source)
    facts = {name: value for name, value in manifest.items() if name not in ("format", "saved", "files")}
    contents = ((name, [memoryview(read(source, name, manifest))]) for name in manifest["files"])
    save(target, dict(contents), facts, overwrite=False)


def opened(path: str, *, shared: bool = False) -> tuple[Any, str, bool]:
    """Return `file_system.opened` of `path`, and whether that is a local disk."""
    files, root = file_system.opened(str(path), shared=shared)
    local = "file" in (files.protocol if isinstance(files.protocol, tuple | list) else (files.protocol,))
    root = os.path.abspath(root) if local else root.rstrip("/")
    return files, root, local


def _exists(files: Any, root: str) -> bool:
    files.invalidate_cache()
    return bool(files.exists(root))


def remove(files: Any, local: bool, path: str, *, recursive: bool = True) -> None:
    """Remove a directory with its files, or (`recursive=False`) a file."""
    if local or not set(path) & set("?*["):
        files.rm(path, recursive=recursive)
        return
    # Not by fsspec's `rm`, for which these signs make a pattern: it removes what else matches, and not `path` itself.
    files.invalidate_cache()
    for file in files.find(path):
        files.rm_file(file)
    with contextlib.suppress(OSError):  # An object store has no directories.
        files.rmdir(path)


def _refuse_other_files(files: Any, root: str, path: str, ours: set[str]) -> None:
    """Raise BadSetting if `root` holds anything but a model, since overwriting removes it."""
    entries = [entry.rstrip("/").rpartition("/")[2] for entry in files.ls(root, detail=False)]
    other = sorted(name for name in entries if name not in ours and not name.endswith(".crc"))
    if other or not files.isdir(root):
        raise BadSetting(
            f"{path!r} holds {', '.join(map(repr, other[:5]))}, which is no part of a model, so it is not overwritten. "
            "Choose another path, or remove it yourself."
        )


def _write(
    files: Any, local: bool, root: str, contents: Mapping[str, Iterable[bytes | memoryview]], facts: Mapping[str, Any]
) -> None:
    files.makedirs(root, exist_ok=True)
    sums = {name: put(files, local, f"{root}/{name}", pieces) for name, pieces in contents.items()}
    manifest = {
        "format": _FORMAT,
        "saved": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **facts,
        "files": sums,
    }
    text = json.dumps(manifest, indent=2).encode()
    put(files, local, f"{root}/{MANIFEST}", [text])
    remember_saved(text)


def put(
    files: Any,
    local: bool,
    path: str,
    pieces: Iterable[bytes | memoryview],
    opener: Callable[[str, int], int] | None = None,
) -> dict[str, Any]:
    """Write a file, synced to the disk where that is local, and return its size and checksum.

    opener : opens a local file, as that of `open`.
    """
    checksum, size = hashlib.sha256(), 0
    with open(path, "wb", opener=opener) if local else files.open(path, "wb") as out:
        for piece in pieces:
            out.write(piece)
            checksum.update(piece)
            size += len(piece)
        if local:
            out.flush()
            os.fsync(out.fileno())
    return {"bytes": size, "sha256": checksum.hexdigest()}


def _move(new: str, root: str) -> None:
    """Move `new` to `root`, and remove what was there, by one atomic exchange where the system has it (Linux)."""
    try:
        os.rename(new, root)
        return
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
    if not _exchange(new, root):
        aside = f"{new}.old"
        os.rename(root, aside)
        os.rename(new, root)
        new = aside
    if os.path.isdir(new):
        shutil.rmtree(new)
    else:
        os.unlink(new)


def _exchange(one: str, other: str) -> bool:
    if platform.system() != "Linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def located(path: str) -> str:
    """Return `path`, or the folder `model` in it, where `TorchModel.save` puts a model beside its Params."""
    files, root, _ = opened(path, shared=True)
    within = not _exists(files, f"{root}/{MANIFEST}") and files.exists(f"{root}/model/{MANIFEST}")
    return f"{path.rstrip('/')}/model" if within else path


def read_manifest(path: str) -> tuple[dict[str, Any], bool]:
    """Return the manifest of the model at `path`, and whether this process wrote it.

    Raises ModelError when there is none, or one of another format.
    """
    files, root, _ = opened(path, shared=True)
    files.invalidate_cache()
    where = f"{MANIFEST} of the model at {path!r}"
    try:
        with files.open(f"{root}/{MANIFEST}", "rb") as file:
            text = file.read()
            manifest = parsed(text, where)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        if _exists(files, root) and not files.isdir(root):
            raise ModelError(f"No model at {path!r}: that is a file, and a model is a directory.") from error
        remains = "an incomplete model (a save that was cut short?)" if _exists(files, root) else "nothing"
        raise ModelError(f"No model at {path!r}: there is {remains}, without {MANIFEST}.") from error
    check(manifest, {}, where)
    if manifest.get("format") != _FORMAT:
        raise ModelError(
            f"The model at {path!r} has format {manifest.get('format')!r}, and this Tritium reads format {_FORMAT}. "
            f"It was saved with {manifest.get('versions')}."
        )
    check(manifest, _FORMS, where)
    return dict(manifest), was_saved_here(text)


def read(path: str, name: str, manifest: Mapping[str, Any]) -> mmap.mmap | bytearray:
    """Return one file of the model, mapped where it is local, else in memory. Raises ModelError if it is damaged."""
    files, root, local = opened(path, shared=True)
    wanted = manifest["files"].get(name)
    if wanted is None:
        raise ModelError(f"The model at {path!r} has no {name}: its manifest lists {sorted(manifest['files'])}.")
    try:
        if local:
            data = mapped(f"{root}/{name}")
        else:
            data = bytearray()
            with files.open(f"{root}/{name}", "rb") as file:
                while piece := file.read(_CHUNK):
                    data += piece
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ModelError(f"The model at {path!r} is incomplete: {name} is missing.") from error
    checksum = hashlib.sha256(data).hexdigest()
    if len(data) != wanted["bytes"] or checksum != wanted["sha256"]:
        raise ModelError(
            f"{name} of the model at {path!r} is damaged: {len(data)} bytes with SHA-256 {checksum[:12]}…, "
            f"and the manifest "
            f"says {wanted['bytes']} bytes with {wanted['sha256'][:12]}…. Save or copy the model again."
        )
    return data


def mapped(path: str) -> mmap.mmap | bytearray:
    """Map a local file, privately writable: processes that map the same file share its memory."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return bytearray()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide whether a model can be read."""
    from tritium.observe.run_directory import installed  # Costs 30 ms, which a worker that only reads models saves.

    return dict(installed("tritium", "torch", "numpy", "cloudpickle"))
