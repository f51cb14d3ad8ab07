"""A data set of Parquet files: its files, row groups, partition columns and schema (any process)."""

from __future__ import annotations

import functools
import json
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from tritium_compat.petastorm import stored_schema
from tritium_compat.petastorm.errors import PetastormMetadataError
from tritium_compat.petastorm.unischema import Unischema

_NULL = "__HIVE_DEFAULT_PARTITION__"
_THREADS = 16  # that read footers
_FOOTERS = 256  # that are kept


@dataclass(frozen=True)
class File:
    """A Parquet file.

    keys : the values of its partition columns, from its path.
    """

    path: str
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file.

    rows : how many; None where no footer was read.
    """

    file: File
    number: int
    rows: int | None


class Dataset:
    """The files below a directory, or those of a list."""

    def __init__(self, filesystem: pyarrow.fs.FileSystem, path: str | Sequence[str]) -> None:
        """Look for the files; FileNotFoundError where there are none."""
        self.filesystem, self.path = filesystem, path
        self.files = _typed(sorted(_found(filesystem, path), key=lambda file: file.path))
        if not self.files:
            raise FileNotFoundError(f"There is no Parquet file at {path}.")
        self.footer = functools.lru_cache(maxsize=_FOOTERS)(functools.partial(_footer, filesystem))

    @functools.cached_property
    def common_metadata(self) -> Mapping[bytes, bytes]:
        """The entries of the file _common_metadata; {} where there is none."""
        if not isinstance(self.path, str):
            return {}
        for name in ("_common_metadata", "_metadata"):
            path = posixpath.join(self.path, name)
            if self.filesystem.get_file_info(path).type == pyarrow.fs.FileType.File:
                return _footer(self.filesystem, path).metadata or {}
        return {}

    @functools.cached_property
    def unischema(self) -> Unischema:
        """The schema that Petastorm stored; PetastormMetadataError where it did not."""
        stored = self.common_metadata.get(stored_schema.UNISCHEMA_KEY)
        if stored is None:
            raise PetastormMetadataError(
                f"{self.path} has no Unischema in _common_metadata: it was not written within materialize_dataset. "
                "Read it by make_batch_reader, or write it again."
            )
        return stored_schema.loads(stored)

    def inferred_schema(self) -> Unischema:
        """Return the schema of the first file, with the partition columns first."""
        keys = [pa.field(name, pa.scalar(value).type, False) for name, value in self.files[0].keys.items()]
        columns = list(self.footer(self.files[0].path).schema.to_arrow_schema())
        return Unischema.from_arrow_schema(
            pa.schema([*keys, *(column for column in columns if column.name not in self.files[0].keys)])
        )

    def row_groups(self, counted: bool) -> list[RowGroup]:
        """Return all row groups in the order of their files' paths.

        counted : with the number of rows of each, for which each file's footer is read.
        """
        stored = self.common_metadata.get(stored_schema.ROW_GROUPS_PER_FILE_KEY)
        if stored is not None and not counted:
            known = json.loads(stored)
            relative = [posixpath.relpath(file.path, str(self.path)) for file in self.files]
            if all(name in known for name in relative):
                return [
                    RowGroup(file, number, None)
                    for file, name in zip(self.files, relative, strict=True)
                    for number in range(known[name])
                ]
        with ThreadPoolExecutor(_THREADS, "tritium-footers") as pool:
            groups = pool.map(lambda file: _groups(file, self.footer(file.path)), self.files)
            return [group for of_file in groups for group in of_file]


def _groups(file: File, footer: Any) -> list[RowGroup]:
    return [RowGroup(file, number, footer.row_group(number).num_rows) for number in range(footer.num_row_groups)]


def _footer(filesystem: pyarrow.fs.FileSystem, path: str) -> Any:
    with filesystem.open_input_file(path) as source:
        try:
            return pq.read_metadata(source)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"{path} is not a Parquet file: {error}") from error


def _found(filesystem: pyarrow.fs.FileSystem, path: str | Sequence[str]) -> Iterator[File]:
    if not isinstance(path, str):
        for each in path:
            yield from _found(filesystem, each)
        return
    info = filesystem.get_file_info(path)
    if info.type == pyarrow.fs.FileType.File:
        yield File(path)
    elif info.type == pyarrow.fs.FileType.Directory:
        base = info.path
        for found in filesystem.get_file_info(pyarrow.fs.FileSelector(path, recursive=True)):
            parts = posixpath.relpath(found.path, base).split("/")
            if found.type == pyarrow.fs.FileType.File and not any(
                part[0] in "._" and "=" not in part for part in parts
            ):
                yield File(found.path, dict(_key(part) for part in parts[:-1] if "=" in part))
    else:
        raise FileNotFoundError(f"There is no data set at {path}.")


def _key(part: str) -> tuple[str, str | None]:
    name, _, value = part.partition("=")
    return unquote(name), None if value == _NULL else unquote(value)


def _typed(files: list[File]) -> list[File]:
    """Return the files with the values of a partition column as integers where all of them are."""
    integers = {
        name
        for name in {name for file in files for name in file.keys}
        if all(_is_integer(file.keys.get(name)) for file in files)
    }
    return [
        File(file.path, {name: int(value) if name in integers else value for name, value in file.keys.items()})
        for file in files
    ]


def _is_integer(value: str | None) -> bool:
    return value is not None and value.removeprefix("-").isdigit()


def rows_of(groups: Iterable[RowGroup]) -> int:
    """Return the rows of row groups that were counted."""
    return sum(group.rows or 0 for group in groups)
