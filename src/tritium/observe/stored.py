"""Files that ranks store in the run directory, sent in pieces (a rank cuts them, the driver joins them)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tritium.errors import BadSetting, StoreFailed
from tritium.file_system import Permissions

PIECE = 1 << 22
"""The most bytes of one piece."""
CLOSE_SECONDS = 30.0
"""The limit for a failed run to wait for uploads."""
MESSAGE_SECONDS = 15.0
"""The time between two messages about an upload that takes long."""


@dataclass(frozen=True)
class Piece:
    """Bytes of the file `name` from position `start` on. The last piece has the whole file's size and CRC-32."""

    name: str
    body: bytes
    start: int = 0
    size: int | None = None
    checksum: int | None = None

    @classmethod
    def whole(cls, name: str, body: bytes) -> Piece:
        """Return a small file as one piece."""
        return cls(name, body, 0, len(body), zlib.crc32(body))

    @classmethod
    def read(cls, fields: Mapping[str, Any], body: bytes) -> Piece:
        """Return the piece that `fields` described. Raises KeyError, TypeError or ValueError for other fields."""
        size, checksum = fields["size"], fields["checksum"]
        if size is None or checksum is None:
            return cls(str(fields["name"]), body, int(fields["start"]))
        return cls(str(fields["name"]), body, int(fields["start"]), int(size), int(checksum))

    def fields(self) -> dict[str, Any]:
        """Return all but the bytes, as JSON takes it."""
        return {"name": self.name, "start": self.start, "size": self.size, "checksum": self.checksum}

    @property
    def last(self) -> bool:
        """Whether the file ends with this piece."""
        return self.size is not None


def cut(name: str, chunks: bytes | Iterable[bytes]) -> Iterator[Piece]:
    """Yield the pieces of a file that comes as bytes or in chunks of any size; at least one.

    Raises BadSetting for a chunk that is not bytes.
    """
    start, checksum, waiting = 0, 0, b""
    for chunk in [chunks] if isinstance(chunks, (bytes, bytearray, memoryview)) else chunks:
        if not isinstance(chunk, (bytes, bytearray, memoryview)):
            raise BadSetting(
                f"world.store({name!r}, …) takes bytes, or an iterable of bytes, and got a {type(chunk).__name__}: "
                f"{chunk!r:.80}. A str must be encoded first, with its encode().",
                name=name,
            )
        view = memoryview(chunk).cast("B")
        for at in range(0, len(view), PIECE):
            if waiting:
                yield Piece(name, waiting, start)
                start, checksum = start + len(waiting), zlib.crc32(waiting, checksum)
            waiting = bytes(view[at : at + PIECE])
    yield Piece(name, waiting, start, start + len(waiting), zlib.crc32(waiting, checksum))


class StoredFiles:
    """Files joined from pieces. A file has its name once it is complete; until then its bytes are in `<name>.part`.

    remote : an fsspec file system and the directory there; None for a local run_dir. A file for it is joined on this
             machine's own disk (tempfile's directory), and uploaded by a thread: the one that adds pieces must not wait
             for a slow store, since ranks consider a coordinator lost after seconds of silence.

    Not thread-safe.
    """

    def __init__(self, run_dir: str, remote: tuple[Any, str] | None) -> None:
        self._run_dir = run_dir
        self._partial: dict[str, _Partial] = {}
        self._uploads = None if remote is None else _Uploads(*remote)

    def path(self, name: str) -> str:
        """Return the path or URL of the file `name` of this run. Raises BadSetting for one outside the directory."""
        return f"{self._run_dir.rstrip('/')}/{self._normal(name)}"

    def _normal(self, name: str) -> str:
        parts = PurePosixPath(name).parts  # An object store takes `.` and an empty part as parts of the key.
        if not parts or name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
            raise BadSetting(f"{name!r} is no name of a file in the run directory {self._run_dir}.", name=name)
        return "/".join(parts)

    def add(self, piece: Piece) -> bool:
        """Add the next piece of a file; one that begins at 0 restarts the file. Returns whether it now has its name.

        Raises StoreFailed where this file or an earlier one can't be written, or where the pieces are not those of one
        file. Then the written bytes are removed, and an earlier file of that name is unchanged.
        """
        piece = replace(piece, name=self._normal(piece.name))
        self._refuse_failed()
        try:
            if not piece.start:
                self._drop(piece.name)
                self._partial[piece.name] = self._begin(piece.name)
            partial = self._partial.get(piece.name)
            if partial is None or partial.size != piece.start:
                raise self._mixed(piece, 0 if partial is None else partial.size)
            partial.add(piece.body)
            if piece.last:
                if (partial.size, partial.checksum) != (piece.size, piece.checksum):
                    raise self._mixed(piece, partial.size)
                self._finish(piece.name, partial)
        except StoreFailed:
            self._drop(piece.name)
            raise
        except Exception as error:
            written = self._partial[piece.name].size if piece.name in self._partial else 0
            failed = self._refused(piece.name, len(piece.body), written, error, last=piece.last)
            self._drop(piece.name)
            raise failed from error
        return piece.last and self._uploads is None

    def wait_for_uploads(self, on_message: Callable[[str], Any] = lambda _: None) -> list[str]:
        """Wait until all complete files are uploaded. Returns the names of those uploaded since the last call.

        on_message : called with a sentence for the user every MESSAGE_SECONDS. Raises StoreFailed.
        """
        if self._uploads is None:
            return []
        while waiting := self._uploads.wait(MESSAGE_SECONDS):
            on_message(f"{waiting} is still being copied to {self._run_dir}")
        self._refuse_failed()
        return self._uploads.taken()

    def discard(self) -> None:
        """Remove files whose last piece has not come."""
        for name in list(self._partial):
            self._drop(name)

    def close(self) -> None:
        """Remove incomplete files, and wait up to CLOSE_SECONDS for uploads, as a store may not answer."""
        self.discard()
        if self._uploads is not None:
            self._uploads.wait(CLOSE_SECONDS)
            self._uploads.close()

    def _refuse_failed(self) -> None:
        if self._uploads is not None and (failed := self._uploads.failed) is not None:
            name, size, error = failed
            raise self._refused(name, size, 0, error, uploading=True) from error

    def _begin(self, name: str) -> _Partial:
        if self._uploads is not None:
            number, place_here = tempfile.mkstemp(".part", "tritium-stored-")
            return _Partial(os.fdopen(number, "wb"), place_here)
        place = Path(f"{self.path(name)}.part")
        permissions = Permissions.within(self._run_dir)
        permissions.makedirs(place.parent)
        return _Partial(open(place, "wb", opener=permissions.opener), str(place))

    def _finish(self, name: str, partial: _Partial) -> None:
        partial.file.close()
        if self._uploads is None:
            os.replace(partial.place, self.path(name))
        else:
            self._uploads.add(name, partial.place, partial.size)
        del self._partial[name]

    def _drop(self, name: str) -> None:
        """Remove an incomplete file. Raises nothing: the caller has an error to raise, or another attempt begins."""
        partial = self._partial.pop(name, None)
        if partial is None:
            return
        with contextlib.suppress(OSError):  # A disk that failed once fails again.
            partial.file.close()
        with contextlib.suppress(OSError):
            os.unlink(partial.place)

    def _mixed(self, piece: Piece, written: int) -> StoreFailed:
        path = self.path(piece.name)
        return StoreFailed(
            f"{path} could not be stored: its pieces are not those of one file ({written:,} bytes are there, and a "
            f"piece from byte {piece.start:,} on came{f', the end of {piece.size:,}' if piece.last else ''}). Do two "
            "threads store a file of this name at once? Give each a name of its own.",
            path=path,
            written=written,
            needed=piece.size,
            free=None,
        )

    def _refused(
        self, name: str, size: int, written: int, error: Exception, *, last: bool = True, uploading: bool = False
    ) -> StoreFailed:
        path, folder, free = self.path(name), self._run_dir, None
        # Before its upload a file is joined on this machine's own disk.
        here = self._uploads is not None and not uploading
        with contextlib.suppress(OSError):  # The next line, too, fails where no directory can be written to.
            folder = tempfile.gettempdir() if here else folder
            free = None if uploading else shutil.disk_usage(folder).free
        known = f" {free:,} bytes are free there." if free is not None else ""
        other = "start this process with another TMPDIR" if here else "choose another run_dir"
        writable = "Start this process with a TMPDIR" if here else "Choose a run_dir"
        move = {
            errno.ENOSPC: f"Free space there, or {other}.",
            errno.EDQUOT: f"Free space within the quota, or {other}.",
            errno.EROFS: f"{writable} that can be written to.",
            errno.EACCES: f"{writable} that this process may write to.",
        }.get(getattr(error, "errno", None) or 0, f"Look at that {'disk' if here else 'store'}, or {other}.")
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".rstrip(".")
        where = f" in {folder}, where it is collected on this machine before its upload" if here else ""
        return StoreFailed(
            f"{path} could not be stored: {why}{where}. {written:,} bytes of it were written, {size:,} more are "
            f"needed{' for its end' if last else ' now'}.{known} Nothing of it is left. {move}",
            path=path,
            written=written,
            needed=written + size,
            free=free,
        )


class _Uploads:
    """The upload of complete files to an fsspec directory, in order, by a thread that runs while there are any."""

    def __init__(self, files: Any, root: str) -> None:
        self._files, self._root = files, root.rstrip("/")
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, str, int]] = deque()
        """Name, path on this machine's disk, and bytes of each file."""
        self._taken: list[str] = []
        self._now = ""
        """The name of the file that is being uploaded."""
        self.failed: tuple[str, int, Exception] | None = None
        """Name, bytes and error of the first file that could not be uploaded. No file is uploaded after it."""

    def add(self, name: str, place: str, size: int) -> None:
        with self._changed:
            self._waiting.append((name, place, size))
            if not self._now:
                self._now = name
                threading.Thread(target=self._run, name="tritium-store", daemon=True).start()

    def wait(self, seconds: float) -> str:
        """Wait up to `seconds` for all uploads. Returns the name of the file that is still being uploaded, or ""."""
        with self._changed:
            self._changed.wait_for(lambda: not self._now, seconds)
            return self._now

    def taken(self) -> list[str]:
        """Return the names of the files uploaded since the last call."""
        with self._changed:
            taken, self._taken = self._taken, []
            return taken

    def close(self) -> None:
        with self._changed:
            for _, place, _ in self._waiting:
                _unlink(place)
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self.failed is not None:
                    self._now = ""
                    self._changed.notify_all()
                    return
                name, place, size = self._waiting.popleft()
                self._now = name
            try:
                self._copy(name, place, size)
            except Exception as error:  # noqa: BLE001 - fsspec's file systems raise errors of any type
                self.failed = name, size, error
            else:
                with self._changed:
                    self._taken.append(name)
            finally:
                _unlink(place)

    def _copy(self, name: str, place: str, size: int) -> None:
        files, target = self._files, f"{self._root}/{name}"
        partial = f"{target}.part"
        files.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            files.put_file(place, partial)
            files.invalidate_cache()
            _check_size(files, partial, size)
            _rename(files, partial, target)
        except BaseException:
            with contextlib.suppress(Exception):  # A file system that failed once fails again.
                files.rm_file(partial)
            raise
        files.invalidate_cache()
        _check_size(files, target, size)


def _unlink(place: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(place)


def _check_size(files: Any, path: str, size: int) -> None:
    if (stored := files.size(path)) != size:
        raise OSError(errno.EIO, f"{stored:,} of {size:,} bytes are there")


def _rename(files: Any, place: str, target: str) -> None:
    """Move a file over another. Unlike the calls used here, fsspec's `mv` and `rm` expand `?`, `*` and `[`."""
    import fsspec  # type: ignore[import-untyped]

    if type(files).mv is fsspec.AbstractFileSystem.mv:
        files.cp_file(place, target)
        files.rm_file(place)
        return
    try:
        files.mv(place, target)
    except FileExistsError:  # Some file systems do not rename over an existing file.
        files.rm_file(target)
        files.mv(place, target)


class _Partial:
    """An incomplete file: the path of its bytes, their number and CRC-32."""

    def __init__(self, file: IO[bytes], place: str) -> None:
        self.file = file
        self.place = place
        self.size = 0
        self.checksum = 0

    def add(self, body: bytes) -> None:
        self.file.write(body)
        self.size += len(body)
        self.checksum = zlib.crc32(body, self.checksum)
