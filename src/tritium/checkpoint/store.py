"""Checkpoints in a run directory, here or on any fsspec file system (any process).

    <run directory>/checkpoints/000000001200/replicated.safetensors   what is the same on every rank: rank 0 writes it
                                             replicated.json          (the tensors, and the tree that holds them)
                                             own-3.safetensors        what is rank 3's own
                                             own-3.json
                                             manifest.json            step, world size, versions; size and SHA-256 of
                                                                      every other file; written last

In a local directory a file is written under another name, synced and renamed; elsewhere it is written in place. A
directory without a manifest is no checkpoint, and one whose files do not match its manifest is skipped. A step that is
saved again gets its own directory, `000000001200-2`, so that the first save is there until then.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tritium.checkpoint.format import MANIFEST, REPLICATED, Checkpoint, Damaged, Loaded, is_name, order, own
from tritium.checkpoint.state import Snapshot, outline, unpack
from tritium.errors import BadSetting, CheckpointFailed, ModelError
from tritium.file_system import Permissions
from tritium.model import files

_CHUNK = 16 << 20


def _makedirs(files: Any, run_dir: str | None, folder: str) -> None:
    """Make a directory in a run directory; None: that one is not local."""
    if run_dir is None:
        files.makedirs(folder, exist_ok=True)
    else:
        Permissions.within(run_dir).makedirs(folder)


class Store:
    """The checkpoints of a run directory. Nothing is written before `prepare`."""

    def __init__(self, run_dir: str, on_progress: Callable[[], None] = lambda: None) -> None:
        """Open the run directory. `on_progress` is called for every piece that is read or written, to show progress."""
        self._on_progress = on_progress
        self._files, root, self._local = files.opened(run_dir)
        self._run_dir, self._root = root, f"{root}/checkpoints"
        self.path = f"{run_dir.rstrip('/')}/checkpoints"
        self.damaged: dict[str, str] = {}
        """Name → the reason why it was skipped; `prune` removes them."""

    # ---- reading

    def names(self) -> list[str]:
        """Return the names of the checkpoints that have a manifest, the newest first.

        Raises CheckpointFailed where the store does not answer, as all methods do that list it.
        """
        return self._complete(self._directories())

    def _complete(self, directories: Iterable[str]) -> list[str]:
        return sorted(filter(self._has_manifest, directories), key=order, reverse=True)

    def _has_manifest(self, name: str) -> bool:
        # Not `exists`: with most of fsspec's file systems it is False after any error. A good checkpoint would then be
        # removed as a leftover because the store did not answer once.
        try:
            self._files.info(f"{self._root}/{name}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except Exception as error:
            raise self._unlisted(error) from error
        return True

    def _directories(self) -> list[str]:
        try:
            self._files.invalidate_cache()
            entries = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._unlisted(error) from error
        names = [entry.rstrip("/").rpartition("/")[2] for entry in entries]
        return [name for name in names if is_name(name)]

    def _unlisted(self, error: Exception) -> CheckpointFailed:
        return CheckpointFailed(
            f"The checkpoints in {self.path} can't be listed: {type(error).__name__}: {error}. None is removed or "
            "skipped because of that; mend what keeps this process from listing them.",
            path=self.path,
        )

    def where(self, name: str) -> str:
        """Return the path of a checkpoint for messages."""
        return f"{self.path}/{name}"

    def manifest(self, name: str) -> Checkpoint:
        """Return a checkpoint by its manifest. Raises Damaged, or CheckpointFailed where the store does not answer."""
        path = f"{self._root}/{name}/{MANIFEST}"
        try:
            self._files.invalidate_cache()
            with self._files.open(path, "rb") as file:
                text = file.read()
        except Exception as error:
            raise self._unread(name, MANIFEST, error) from error
        return Checkpoint.of(name, text, self.where(name))

    def candidates(self) -> list[str]:
        """Return the checkpoints to try, the newest first; those that were never completed are recorded as damaged."""
        directories = self._directories()
        complete = self._complete(directories)
        for name in directories:
            if name not in complete and (not complete or order(name) > order(complete[0])):
                self.damaged[name] = (
                    f"The checkpoint {self.where(name)} was never completed: its save was cut short before {MANIFEST}."
                )
        return [name for name in complete if name not in self.damaged]

    def newest(self) -> tuple[Loaded | None, list[str]]:
        """Return the newest checkpoint that can be loaded, and for each newer one a sentence on why it can't."""
        for name in self.candidates():
            try:
                return self.load(name), list(self.damaged.values())
            except Damaged as reason:
                self.damaged[name] = str(reason)
        return None, list(self.damaged.values())

    def load(self, name: str) -> Loaded:
        """Read a checkpoint and check every file of it. Raises Damaged."""
        checkpoint = self.manifest(name)
        state = self._state(checkpoint, REPLICATED)
        owned = [
            self._state(checkpoint, own(r)) if f"{own(r)}.json" in checkpoint.files else None
            for r in range(checkpoint.size)
        ]
        if not isinstance(state, dict):
            raise Damaged(f"The checkpoint {self.where(name)} holds a {type(state).__name__} instead of a dict.")
        return Loaded(state, step=checkpoint.step, size=checkpoint.size, own=owned, path=self.where(name))

    def outline(self, name: str) -> tuple[int, Any]:
        """Return a checkpoint's step and state, with None for tensors and arrays: a small file. Raises Damaged."""
        checkpoint = self.manifest(name)
        structure = self._checked(checkpoint, f"{REPLICATED}.json")
        try:
            return checkpoint.step, outline(structure)
        except ModelError as error:
            raise Damaged(f"{REPLICATED} of the checkpoint {self.where(name)} can't be read: {error}") from error

    def _state(self, checkpoint: Checkpoint, part: str) -> Any:
        structure, tensors = (self._checked(checkpoint, f"{part}.{kind}") for kind in ("json", "safetensors"))
        try:
            return unpack(structure, tensors)
        except ModelError as error:
            raise Damaged(f"{part} of the checkpoint {self.where(checkpoint.name)} can't be read: {error}") from error

    def _checked(self, checkpoint: Checkpoint, name: str) -> bytearray:
        """Return a file of the checkpoint, checked against its manifest. Raises Damaged.

        It is read, not mapped: another rank may remove an old checkpoint while its tensors are still in use.
        """
        where = self.where(checkpoint.name)
        wanted = checkpoint.files.get(name)
        if wanted is None:
            raise Damaged(f"The checkpoint {where} has no {name}: its manifest lists {sorted(checkpoint.files)}.")
        checksum, data = hashlib.sha256(), bytearray()
        try:
            with self._files.open(f"{self._root}/{checkpoint.name}/{name}", "rb") as file:
                while len(data) <= wanted["bytes"] and (piece := file.read(_CHUNK)):
                    self._on_progress()
                    checksum.update(piece)
                    data += piece
        except Exception as error:
            raise self._unread(checkpoint.name, name, error) from error
        if len(data) != wanted["bytes"]:
            more = "more than " if len(data) > wanted["bytes"] else ""
            raise Damaged(
                f"{name} of the checkpoint {where} has {more}{min(len(data), wanted['bytes']):,} bytes, and "
                f"{wanted['bytes']:,} were saved."
            )
        if checksum.hexdigest() != wanted["sha256"]:
            raise Damaged(
                f"{name} of the checkpoint {where} is damaged: of its {len(data):,} bytes the SHA-256 is "
                f"{checksum.hexdigest()[:12]}…, and {wanted['sha256'][:12]}… was saved."
            )
        return data

    def _unread(self, name: str, part: str, error: Exception) -> Exception:
        """Return Damaged for a file that is missing or that the local disk can't read, else CheckpointFailed.

        A store that does not answer now may answer at the next start, so its checkpoint must not be skipped.
        """
        where = self.where(name)
        if isinstance(error, FileNotFoundError):
            return Damaged(f"{part} of the checkpoint {where} is missing.")
        if isinstance(error, OSError) and self._local and error.errno in (errno.EIO, errno.EISDIR):
            return Damaged(f"{part} of the checkpoint {where} can't be read: {error.strerror}.")
        return CheckpointFailed(
            f"{part} of the checkpoint {where} can't be read: {type(error).__name__}: {error}. It is left as it is; "
            "mend what keeps this process from reading it, and start again.",
            path=where,
        )

    # ---- writing

    def prepare(self, step: int) -> str:
        """Make the directory of a checkpoint that is to be written, and return its name.

        Leftovers of interrupted saves are removed. Raises BadSetting when there is a checkpoint of a later step.
        """
        if not 0 <= step < 10**12:
            raise BadSetting(f"step={step} of a checkpoint must be a whole number from 0 to {10**12 - 1:,}.")
        directories = self._directories()
        complete = self._complete(directories)
        later = [name for name in complete if order(name)[0] > step and name not in self.damaged]
        if later:
            raise BadSetting(
                f"{self.path} holds a checkpoint of step {order(later[0])[0]}, later than step {step} that is to "
                "be saved. To continue from it, call world.checkpoint.load() first; to start over, choose another "
                "run_dir.",
                step=step,
            )
        again = [order(name)[1] for name in complete if order(name)[0] == step]
        name = f"{step:012}" + (f"-{max(again) + 1}" if again else "")
        try:
            for leftover in set(directories) - set(complete):
                self._remove(leftover)
                self.damaged.pop(leftover, None)
            _makedirs(self._files, self._run_dir if self._local else None, f"{self._root}/{name}")
            self._sync(os.path.dirname(self._root), self._root)
        except Exception as error:
            raise self.failed(name, error, 0) from error
        return name

    def write(self, name: str, part: str, snapshot: Snapshot) -> dict[str, dict[str, Any]]:
        """Write the two files of a part, and return their entries for the manifest."""
        folder = f"{self._root}/{name}"
        sums = {}
        try:
            _makedirs(self._files, self._run_dir if self._local else None, folder)
            for kind, pieces in (("safetensors", snapshot.pieces()), ("json", [snapshot.structure])):
                sums[f"{part}.{kind}"] = self._put(f"{folder}/{part}.{kind}", pieces)
            self._sync(folder)
        except Exception as error:
            raise self.failed(name, error, snapshot.total, part) from error
        return sums

    def commit(self, name: str, size: int, sums: Mapping[str, Mapping[str, Any]]) -> Checkpoint:
        """Write the manifest, which completes the checkpoint."""
        checkpoint = Checkpoint(name, order(name)[0], size, {part: dict(facts) for part, facts in sums.items()})
        text = checkpoint.manifest()
        try:
            self._put(f"{self._root}/{name}/{MANIFEST}", [text])
            self._sync(f"{self._root}/{name}", self._root)
        except Exception as error:
            raise self.failed(name, error, len(text), "manifest") from error
        return checkpoint

    def prune(self, keep: int) -> None:
        """Remove damaged checkpoints, and all but the last save of the newest `keep` steps, each manifest first."""
        good = [name for name in self.names() if name not in self.damaged]
        newest = dict.fromkeys(order(name)[0] for name in good)
        kept = {next(name for name in good if order(name)[0] == step) for step in list(newest)[:keep]}
        for name in [*(name for name in good if name not in kept), *self.damaged]:
            try:
                self._remove(name)
            except Exception as error:
                raise CheckpointFailed(
                    f"{self.where(name)} is older than the newest {keep} checkpoints and can't be removed: {error!r}.",
                    path=self.where(name),
                ) from error
        self.damaged.clear()

    def discard(self, name: str) -> None:
        """Remove what there is of a checkpoint that could not be written, unless it has its manifest."""
        try:
            if name not in self.names():
                self._remove(name)
        except Exception:  # noqa: BLE001 - the same disk fails again, and its first error is already being raised
            return

    def _put(self, path: str, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
        if not self._local:
            return files.put(self._files, False, path, self._reported(pieces))
        opener = Permissions.within(self._run_dir).opener
        facts = files.put(self._files, True, f"{path}.part", self._reported(pieces), opener)
        os.replace(f"{path}.part", path)
        return facts

    def _reported(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for piece in pieces:
            self._on_progress()
            yield piece

    def _remove(self, name: str) -> None:
        folder = f"{self._root}/{name}"
        with contextlib.suppress(FileNotFoundError):
            files.remove(self._files, self._local, f"{folder}/{MANIFEST}", recursive=False)
        self._sync(folder)
        with contextlib.suppress(FileNotFoundError):
            files.remove(self._files, self._local, folder)

    def _sync(self, *folders: str) -> None:
        for folder in folders if self._local else ():
            with contextlib.suppress(FileNotFoundError):
                number = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(number)
                finally:
                    os.close(number)

    def failed(self, name: str, error: Exception, needed: int, part: str = "") -> CheckpointFailed:
        """Return the error for a failed write, with the bytes that are needed, written and free."""
        written, free = 0, None
        if self._local:
            with contextlib.suppress(OSError):
                mine = [e for e in os.scandir(f"{self._root}/{name}") if e.name.startswith(part)]
                written = sum(entry.stat().st_size for entry in mine)
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(_there(self._root)).free
        known = f" and {free:,} are free" if free is not None else ""
        before = [other for other in _quietly(self.names) if other != name and other not in self.damaged]
        intact = f"Earlier checkpoints are intact, the newest of step {order(before[0])[0]}." if before else ""
        move = {
            errno.ENOSPC: "Free space there, choose another run_dir, or keep fewer checkpoints (keep=1).",
            errno.EDQUOT: "Free space within the quota, choose another run_dir, or keep fewer checkpoints (keep=1).",
            errno.EROFS: "Choose a run_dir that can be written to.",
            errno.EACCES: "Choose a run_dir that this process may write to.",
        }.get(getattr(error, "errno", None) or 0, "")
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        text = (
            f"The checkpoint {self.where(name)} could not be written{f' ({part})' if part else ''}: {why}. "
            f"{needed:,} bytes are needed, {written:,} were written{known}."
        )
        return CheckpointFailed(
            " ".join(filter(None, [text, intact, move])),
            path=self.where(name),
            needed=needed,
            written=written,
            free=free,
        )


def _there(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _quietly(names: Any) -> Sequence[str]:
    try:
        listed: Sequence[str] = names()
    except Exception:  # noqa: BLE001 - the directory can't be listed either; the first error is reported
        return ()
    return listed
