"""The spool: rows of a shard in unlinked local files, which a supervisor writes and its rank maps (supervisor, rank).

A fixed column is one file, a row-major matrix; a column of bytes is a file of its values and one of the 64-bit end of
each row. The files have no name, so that none is left however the run ends; the rank inherits the descriptors
(`subprocess.Popen(pass_fds=spool.fds)`).
"""

from __future__ import annotations

import errno
import math
import mmap
import operator
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritium.data.schema import Field
from tritium.errors import MALFORMED, BadSetting, DataError, SpoolFull

Array = np.ndarray[Any, Any]
IDS = "_id"
BLOCK_BYTES = 1 << 20  # Rows with a stride are put side by side in blocks that stay in the processor's cache.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths: `values` of all rows one after another, and `lengths` int64 [rows]."""

    values: Any
    lengths: Any

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[Any]:
        """Return the rows, each a view of `values`."""
        ends = np.cumsum(np.asarray(self.lengths, np.int64))
        return [self.values[end - length : end] for end, length in zip(ends, self.lengths, strict=True)]


class Spool:
    """A writer of rows to unlinked files in `directory`. Appended rows count from the next `commit()` on.

    directory : None for `scratch_directory()`.

    Not thread-safe: a spool has one writer. Raises BadSetting where this process may not open a file for each column,
    SpoolFull on a full disk.
    """

    def __init__(self, fields: Sequence[Field], directory: str | None = None) -> None:
        self.directory = directory or scratch_directory()
        self.rows = 0
        self._appended = 0
        self._row_bytes = 0
        self._files: list[_File] = []
        try:
            self._columns = [_ColumnFiles(IDS, "fixed", "int64", (), [self._open()])]
            for field in fields:
                files = [self._open() for _ in range(1 if field.kind == "fixed" else 2)]
                shape = field.shape if field.kind == "fixed" else ()
                self._columns.append(_ColumnFiles(field.name, field.kind, field.dtype, shape, files))
                if field.mask:
                    self._columns.append(_ColumnFiles(f"{field.name}_mask", "fixed", "bool", None, [self._open()]))
        except BaseException:
            self.close()
            raise

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that a rank process must inherit under the same numbers."""
        return tuple(file.fd for file in self._files)

    @property
    def bytes(self) -> int:
        """Bytes written so far."""
        return sum(file.written for file in self._files)

    def append(self, ids: Array, columns: Mapping[str, Array | Ragged]) -> None:
        """Write rows: `ids` int64 [rows], and every column [rows, *shape] or Ragged in its field's dtype.

        Raises DataError where a column is missing or does not fit the rows before, SpoolFull on a full disk.
        """
        rows = len(ids)
        pieces: list[tuple[_File, Array]] = []
        for column in self._columns:
            if column.name != IDS and column.name not in columns:
                raise DataError(f"column {column.name!r} is missing from the rows given to the spool")
            value = ids if column.name == IDS else columns[column.name]
            pieces.extend(column.pieces(value, rows))
        more = sum(array.nbytes for _, array in pieces)
        self._row_bytes = -(-more // max(1, rows))
        for file, array in pieces:
            more -= array.nbytes
            self._write(file, array, more)
        self._appended += rows

    def commit(self) -> int:
        """Make the appended rows count. Returns the rows of the spool."""
        self.rows = self._appended
        return self.rows

    def clear(self) -> None:
        """Drop all rows. No reader may have mapped them."""
        self.rows = self._appended = 0
        for file in self._files:
            file.clear()
        for column in self._columns:
            column.clear()

    def describe(self) -> list[dict[str, Any]]:
        """Return the columns for a SpoolReader, as JSON, ids first. A shape is None until the first row."""
        return [column.describe() for column in self._columns]

    def close(self) -> None:
        """Close the descriptors. Existing maps stay valid."""
        while self._files:
            os.close(self._files.pop().fd)

    def _open(self) -> _File:
        try:
            file = _File(_unlinked_file(self.directory))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise BadSetting(
                    "the spool has more columns than this process may open files "
                    f"({len(self._files)} are open): "
                    'pack scalars to one column (columns={"features": [...]}) or raise the limit (ulimit -n)'
                ) from error
            if error.errno in _FULL:
                raise self._full(error, 0) from error
            raise
        self._files.append(file)
        return file

    def _write(self, file: _File, array: Array, more: int) -> None:
        if array.nbytes == 0:
            return
        step = len(array) if array.flags.c_contiguous else max(1, BLOCK_BYTES * len(array) // array.nbytes)
        more += array.nbytes
        for start in range(0, len(array), step):
            rest = np.ascontiguousarray(array[start : start + step]).reshape(-1).view(np.uint8).data
            while rest:
                try:
                    done = os.write(file.fd, rest)
                except OSError as error:
                    if error.errno in _FULL:
                        raise self._full(error, more) from error
                    raise
                file.written += done
                more -= done
                rest = rest[done:]

    def _full(self, error: OSError, needed: int) -> SpoolFull:
        disk = shutil.disk_usage(self.directory)
        place = f"{self.directory} on {socket.gethostname()}"
        written = f"{_size(self.bytes)} are written"
        if self._row_bytes:
            written += f" ({self.rows:,} rows; each takes some {self._row_bytes:,} bytes)"
        return SpoolFull(
            f"the spool in {place} can't grow: {error.strerror}. {written}, {_size(needed)} more are needed now, "
            f"{_size(disk.free)} of {_size(disk.total)} are free there, where Spark's own shuffle files may be too. "
            "Point spark.local.dir (or SPARK_LOCAL_DIRS) at a larger disk, or use more hosts.",
            directory=self.directory,
            written=self.bytes,
            needed=needed,
            free=disk.free,
        )


class SpoolReader:
    """The columns of a spool, mapped read-only.

    description : `Spool.describe()`, whose descriptors are open in this process.
    rows        : the number of rows to show.

    Raises DataError, as do its columns, where the description or the files are no spool's. The files have no checksums.
    """

    def __init__(self, description: Sequence[Mapping[str, Any]], rows: int) -> None:
        self.rows = rows
        try:
            self._entries = {str(entry["name"]): entry for entry in description}
        except MALFORMED as error:
            raise DataError(f"The description of the spool is damaged: {error!r:.200}.") from error
        self._maps: dict[str, tuple[int, Array | RaggedView]] = {}
        self.names = tuple(name for name in self._entries if name != IDS)
        """The batch columns, masks included, ids not."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all columns, on average."""
        columns = [self.column(name) for name in self.names]
        size = sum(c.values.nbytes + c.ends.nbytes if isinstance(c, RaggedView) else c.nbytes for c in columns)
        return -(-size // max(1, self.rows))

    @property
    def ids(self) -> Array:
        """int64 [rows], in the order in which the rows arrived."""
        column = self.column(IDS)
        if not isinstance(column, np.ndarray) or column.dtype != np.int64 or column.ndim != 1:
            raise DataError("The spool is damaged: its ids are no column of int64.", column=IDS)
        return column

    def extend(self, rows: int) -> None:
        """Show at least `rows` rows from now on. Views taken before stay valid."""
        self.rows = max(self.rows, rows)

    def column(self, name: str) -> Array | RaggedView:
        """Return a fixed column as [rows, *shape], or a column of bytes as RaggedView. Nothing is read yet."""
        rows, column = self._maps.get(name, (-1, None))
        if column is None or rows != self.rows:
            try:
                column = self._map(self._entries[name])
            except (OSError, *MALFORMED) as error:
                raise DataError(
                    f"The spool's column {name!r} can't be mapped for {self.rows:,} rows: {error!r:.200}.", column=name
                ) from error
            self._maps[name] = (self.rows, column)
        return column

    def close(self) -> None:
        """Release the maps; each is unmapped when its last view is gone."""
        self._maps.clear()

    def _map(self, entry: Mapping[str, Any]) -> Array | RaggedView:
        dtype, fds = np.dtype(entry["dtype"]), entry["fds"]
        if entry["kind"] == "fixed":
            shape = (self.rows, *map(operator.index, entry["shape"] or ()))
            return _map(fds[0], dtype, math.prod(shape)).reshape(shape)
        ends = _map(fds[1], np.dtype(np.int64), self.rows)
        return RaggedView(_map(fds[0], dtype, int(ends[-1]) if self.rows else 0), ends)


class RaggedView:
    """A mapped column of rows of different lengths: `values` of all rows, and the `ends` of the rows, int64 [rows]."""

    def __init__(self, values: Array, ends: Array) -> None:
        self.values = values
        self.ends = ends

    def __len__(self) -> int:
        return len(self.ends)

    def take(self, index: Array) -> Ragged:
        """Return the rows at `index` int64 [k], copied. Raises DataError where the ends are those of no rows."""
        ends = self.ends[index]
        starts = np.where(index > 0, self.ends[index - 1], 0)
        lengths = ends - starts
        if len(index) and not (starts.min() >= 0 and lengths.min() >= 0 and ends.max() <= len(self.values)):
            raise DataError(
                f"The spool is damaged: rows of {lengths.min():,} to {lengths.max():,} values end at up to "
                f"{ends.max():,} of {len(self.values):,}."
            )
        shift = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        return Ragged(self.values[shift + np.arange(len(shift))], lengths)


def scratch_directory() -> str:
    """Return the cluster manager's scratch directory with the most free space, else the system's."""
    for variable in ("SPARK_LOCAL_DIRS", "LOCAL_DIRS", "SPARK_EXECUTOR_DIRS"):
        writable = list(_writable(os.environ.get(variable, "").replace(os.pathsep, ",").split(",")))
        if writable:
            return max(writable)[1]
    return tempfile.gettempdir()


def _writable(directories: Iterable[str]) -> Iterable[tuple[int, str]]:
    for directory in map(str.strip, directories):
        if directory and os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK):
            yield shutil.disk_usage(directory).free, directory


class _File:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.written = 0

    def clear(self) -> None:
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        self.written = 0


class _ColumnFiles:
    """One column of a spool that is being written."""

    def __init__(self, name: str, kind: str, dtype: str, shape: tuple[int, ...] | None, files: list[_File]) -> None:
        self.name = name
        self.kind = kind
        self.dtype = np.dtype(dtype)
        self.shape = self._planned = shape
        self.files = files
        self._end = 0

    def clear(self) -> None:
        self.shape, self._end = self._planned, 0

    def pieces(self, value: Array | Ragged, rows: int) -> list[tuple[_File, Array]]:
        """Return (file, array to append to it) pairs. Raises DataError where dtype, rows or shape do not fit."""
        values = value.values if isinstance(value, Ragged) else value
        layout = "ragged" if isinstance(value, Ragged) else "fixed"
        wanted = "fixed" if self.kind == "fixed" else "ragged"
        if layout != wanted or values.dtype != self.dtype or len(value) != rows:
            raise DataError(
                f"column {self.name!r} takes {rows} rows of {wanted} {self.dtype}, "
                f"and was given {len(value)} of {layout} {values.dtype}",
                column=self.name,
            )
        if isinstance(value, Ragged):
            ends = np.cumsum(value.lengths, dtype=np.int64) + self._end
            self._end = int(ends[-1]) if rows else self._end
            return [(self.files[0], np.ascontiguousarray(values)), (self.files[1], ends)]
        if self.shape is None and rows:
            self.shape = values.shape[1:]
        if rows and values.shape[1:] != self.shape:
            raise DataError(
                f"column {self.name!r} has rows of shape {self.shape} and now one of {values.shape[1:]}",
                column=self.name,
            )
        return [(self.files[0], values)]

    def describe(self) -> dict[str, Any]:
        shape = None if self.shape is None else list(self.shape)
        fds = [file.fd for file in self.files]
        return {"name": self.name, "kind": self.kind, "dtype": self.dtype.name, "shape": shape, "fds": fds}


def _map(fd: int, dtype: np.dtype[Any], count: int) -> Array:
    """Map the first `count` items of a file, read-only."""
    if count == 0:
        return np.empty(0, dtype)
    memory = mmap.mmap(fd, count * dtype.itemsize, prot=mmap.PROT_READ)
    return np.frombuffer(memory, dtype, count)


def _unlinked_file(directory: str) -> int:
    """Open a file in `directory` that has no name, for reading and writing. Returns its descriptor."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is not None:
        try:
            return os.open(directory, flag | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:  # File systems without O_TMPFILE (overlayfs, NFS) raise one of these.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    fd, path = tempfile.mkstemp(prefix="tritium-spool-", dir=directory)
    os.unlink(path)
    return fd


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
