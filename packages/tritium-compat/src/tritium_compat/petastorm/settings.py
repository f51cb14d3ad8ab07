"""The settings of Petastorm's readers (any process)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tritium.errors import TritiumWarning
from tritium.integration import suggest
from tritium_compat.petastorm.predicates import PredicateBase
from tritium_compat.petastorm.transform import TransformSpec


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of both readers.

    schema_fields : which fields, as `UnischemaField`s or regular expressions of whole names; None: all. `make_reader`
        also takes an `NGram`.
    reader_pool_type : "thread"; "dummy" loads in the thread that iterates. "process" is not needed: threads are used.
    workers_count : how many threads load row groups.
    results_queue_size : how many row groups they load ahead at most. Fewer where those exceed 256 MB.
    seed : of the order of row groups and rows; None: another one each time.
    shuffle_rows : rows are in random order within a row group.
    shuffle_row_groups : row groups are in random order, another one in each epoch.
    shuffle_row_drop_partitions : n: each row group is read in n parts, which are shuffled as row groups are.
    predicate : which rows, see `predicates`.
    num_epochs : how often all rows are read; None: without end.
    cur_shard, shard_count : read only one of several shards.
    equal_shards : not in Petastorm. All shards have equally many rows, see `shards.equal`; False: whole row groups.
        Where a predicate or filters choose rows, shards are of whole row groups in any case.
    transform_spec : what is done with rows, see `TransformSpec`.
    filters : pyarrow's filters, `[("year", ">", 2000)]`, or an expression of it.
    storage_options : for fsspec, which opens all but local files and HDFS.
    filesystem : of pyarrow or fsspec, in place of the URL's own.
    rowgroup_selector : refused: Petastorm's indexes of row groups are not read. Use filters or a predicate.
    the others : no longer needed.
    """

    schema_fields: Any = None
    reader_pool_type: str = "thread"
    workers_count: int = 10
    results_queue_size: int = 50
    seed: int | None = None
    shuffle_rows: bool = False
    shuffle_row_groups: bool = True
    shuffle_row_drop_partitions: int = 1
    predicate: PredicateBase | None = None
    num_epochs: int | None = 1
    cur_shard: int | None = None
    shard_count: int | None = None
    equal_shards: bool = True
    transform_spec: TransformSpec | None = None
    filters: Any = None
    storage_options: Any = None
    filesystem: Any = None
    rowgroup_selector: Any = None
    pyarrow_serialize: bool = False
    shard_seed: int | None = None
    cache_type: str | None = "null"
    cache_location: str | None = None
    cache_size_limit: int | None = None
    cache_row_size_estimate: int | None = None
    cache_extra_settings: Any = None
    hdfs_driver: str = "libhdfs3"
    zmq_copy_buffers: bool = True
    convert_early_to_numpy: bool = False

    def check(self) -> None:
        """Refuse what can't be done, and warn of what is not needed."""
        if self.rowgroup_selector is not None:
            raise NotImplementedError(
                "rowgroup_selector: Petastorm's indexes of row groups are not read here. Use filters=, which skips "
                "rows by their columns, or predicate=."
            )
        if self.reader_pool_type not in ("thread", "process", "dummy"):
            raise ValueError(f'reader_pool_type={self.reader_pool_type!r}: there is "thread", "process" and "dummy".')
        if self.cache_type not in (None, "null", "local-disk"):
            raise ValueError(f'cache_type={self.cache_type!r}: there is None, "null" and "local-disk".')
        for name, least in (("workers_count", 1), ("results_queue_size", 1), ("shuffle_row_drop_partitions", 1)):
            _whole(name, getattr(self, name), least)
        if self.num_epochs is not None:
            _whole("num_epochs", self.num_epochs, 1)
        if self.predicate is not None and not isinstance(self.predicate, PredicateBase):
            raise ValueError(
                f"predicate={self.predicate!r}: it must be a PredicateBase, such as in_lambda([…], function)."
            )
        notes = {
            "reader_pool_type": self.reader_pool_type == "process" and "threads load the rows, in this process",
            "cache_type": self.cache_type == "local-disk" and "rows are read from their files in each epoch",
            "shard_seed": self.shard_seed is not None and "seed= orders the row groups of a shard",
            "pyarrow_serialize": self.pyarrow_serialize and "rows do not leave this process",
        }
        for name, note in notes.items():
            if note:
                warnings.warn(f"petastorm: {name}={getattr(self, name)!r} is not needed: {note}.", TritiumWarning, 4)


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        also = " or None" if name == "num_epochs" else ""
        raise ValueError(f"{name}={value!r}: it must be a whole number of at least {least}{also}.")


def of(function: str, schema_fields: Any, given: dict[str, Any]) -> Settings:
    """Return the settings that a function was given; TypeError of an unknown one."""
    known = {field.name for field in fields(Settings)}
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() has no argument {name!r}.{suggest(name, sorted(known))}")
    settings = Settings(schema_fields=schema_fields, **given)
    settings.check()
    return settings
