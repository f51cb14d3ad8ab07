"""Files that ranks store in the run directory, piece by piece (a rank cuts them, the driver puts them together)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tritium.errors import BadSetting, StoreFailed

PIECE = 1 << 22  # bytes of one piece at most


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
        """A small file in one piece."""
        return cls(name, body, 0, len(body), zlib.crc32(body))

    @classmethod
    def read(cls, fields: Mapping[str, Any], body: bytes) -> Piece:
        """The inverse of `fields`. Raises KeyError, TypeError or ValueError for what is none."""
        size, checksum = fields["size"], fields["checksum"]
        if size is None or checksum is None:
            return cls(str(fields["name"]), body, int(fields["start"]))
        return cls(str(fields["name"]), body, int(fields["start"]), int(size), int(checksum))

    def fields(self) -> dict[str, Any]:
        """All but the bytes, as JSON takes it."""
        return {"name": self.name, "start": self.start, "size": self.size, "checksum": self.checksum}

    @property
    def last(self) -> bool:
        """Whether the file ends with this one."""
        return self.size is not None


def cut(name: str, chunks: bytes | Iterable[bytes]) -> Iterator[Piece]:
    """The pieces of a file that comes in chunks of any size; at least one. Bytes are a chunk themselves.

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
    """Puts pieces together. A file has its name once it is whole; until then its bytes are in `<name>.part`.

    `remote` is an fsspec file system and the directory there. Not safe for several threads.
    """

    def __init__(self, run_dir: str, remote: tuple[Any, str] | None) -> None:
        self._run_dir = run_dir
        self._remote = remote
        self._partial: dict[str, _Partial] = {}

    def path(self, name: str) -> str:
        """Where the file `name` of this run is: a path, or a URL. BadSetting when it would lie outside."""
        parts = PurePosixPath(name).parts
        if not parts or name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
            raise BadSetting(f"{name!r} is no name of a file in the run directory {self._run_dir}.", name=name)
        return "/".join((self._run_dir.rstrip("/"), *parts))

    def add(self, piece: Piece) -> None:
        """Take the next piece of a file; one that begins at 0 starts the file anew.

        Raises StoreFailed when the directory refuses, or when the pieces are not those of one file; then nothing is
        left of what was written, and an earlier file of that name is as it was.
        """
        self.path(piece.name)
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
            failed = self._refused(piece, error)
            self._drop(piece.name)
            raise failed from error

    def discard(self) -> None:
        """Remove what there is of files whose last piece has not come."""
        for name in list(self._partial):
            self._drop(name)

    def _begin(self, name: str) -> _Partial:
        if self._remote is None:
            place = Path(f"{self.path(name)}.part")
            place.parent.mkdir(parents=True, exist_ok=True)
            return _Partial(place.open("wb"), str(place))
        files, root = self._remote
        place_there = f"{root.rstrip('/')}/{name}.part"
        files.makedirs(place_there.rpartition("/")[0], exist_ok=True)
        return _Partial(files.open(place_there, "wb"), place_there)

    def _finish(self, name: str, partial: _Partial) -> None:
        partial.file.close()
        if self._remote is None:
            os.replace(partial.place, self.path(name))
        else:
            files, _ = self._remote
            target = partial.place.removesuffix(".part")
            files.invalidate_cache()
            _check_size(files, partial.place, partial.size)
            _rename(files, partial.place, target)
            files.invalidate_cache()
            _check_size(files, target, partial.size)
        del self._partial[name]

    def _drop(self, name: str) -> None:
        """Nothing is raised: whatever made this necessary is on its way already, or another attempt begins."""
        partial = self._partial.pop(name, None)
        if partial is None:
            return
        with contextlib.suppress(Exception):  # a file system that has refused refuses again
            partial.file.close()
        with contextlib.suppress(Exception):
            if self._remote is None:
                os.unlink(partial.place)
            else:
                self._remote[0].rm_file(partial.place)

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

    def _refused(self, piece: Piece, error: Exception) -> StoreFailed:
        path = self.path(piece.name)
        written = self._partial[piece.name].size if piece.name in self._partial else 0
        free = None
        if self._remote is None:
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self._run_dir).free
        known = f" {free:,} bytes are free there." if free is not None else ""
        move = {
            errno.ENOSPC: "Free space there, or choose another run_dir.",
            errno.EDQUOT: "Free space within the quota, or choose another run_dir.",
            errno.EROFS: "Choose a run_dir that can be written to.",
            errno.EACCES: "Choose a run_dir that this process may write to.",
        }.get(getattr(error, "errno", None) or 0, "Look at that store, or choose another run_dir.")
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".rstrip(".")
        return StoreFailed(
            f"{path} could not be stored: {why}. {written:,} bytes of it were written, {len(piece.body):,} more are "
            f"needed{' for its end' if piece.last else ' now'}.{known} Nothing of it is left. {move}",
            path=path,
            written=written,
            needed=written + len(piece.body),
            free=free,
        )


def _check_size(files: Any, path: str, size: int) -> None:
    if (there := files.size(path)) != size:
        raise OSError(errno.EIO, f"{there:,} of {size:,} bytes are there")


def _rename(files: Any, place: str, target: str) -> None:
    """Over what is there. fsspec's own `mv` and `rm` take `?`, `*` and `[` in a path for a pattern; these do not."""
    import fsspec  # type: ignore[import-untyped]

    if type(files).mv is fsspec.AbstractFileSystem.mv:
        files.cp_file(place, target)
        files.rm_file(place)
        return
    try:
        files.mv(place, target)
    except FileExistsError:  # a file system that does not rename over what is there
        files.rm_file(target)
        files.mv(place, target)


class _Partial:
    """What there is of a file: its bytes in `place`, how many, and their CRC-32."""

    def __init__(self, file: IO[bytes], place: str) -> None:
        self.file = file
        self.place = place
        self.size = 0
        self.checksum = 0

    def add(self, body: bytes) -> None:
        self.file.write(body)
        self.size += len(body)
        self.checksum = zlib.crc32(body, self.checksum)
