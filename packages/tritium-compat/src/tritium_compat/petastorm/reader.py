"""`make_reader` and `make_batch_reader`: iterators over a data set of Parquet files (any process)."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tritium_compat.petastorm import shards
from tritium_compat.petastorm.dataset import Dataset, RowGroup
from tritium_compat.petastorm.errors import NoDataAvailableError, PetastormMetadataError
from tritium_compat.petastorm.fs_utils import get_filesystem_and_path_or_paths, normalize_dir_url
from tritium_compat.petastorm.load import Load, LoadBatches, LoadRows
from tritium_compat.petastorm.ngram import NGram
from tritium_compat.petastorm.predicates import PredicateBase
from tritium_compat.petastorm.prefetch import InOrder
from tritium_compat.petastorm.settings import Settings
from tritium_compat.petastorm.settings import of as settings_of
from tritium_compat.petastorm.shards import Part
from tritium_compat.petastorm.transform import transform_schema
from tritium_compat.petastorm.unischema import Unischema


def make_reader(dataset_url: str | list[str], schema_fields: Any = None, **settings: Any) -> Reader:
    """Return a reader of a data set that Petastorm wrote: named tuples, one a row, of decoded values.

    dataset_url : a directory, or a list of files: "file:///tmp/mnist", "hdfs://…", "s3://…".
    settings : see `settings.Settings`.
    """
    chosen = settings_of("make_reader", schema_fields, settings)
    dataset = _dataset(dataset_url, chosen)
    try:
        schema = dataset.unischema
    except PetastormMetadataError as error:
        if "can't be read" in str(error):
            raise
        warnings.warn(f"make_reader: {error}", stacklevel=2)
        schema = dataset.inferred_schema()
    return Reader(dataset, schema, chosen, batched=False)


def make_batch_reader(dataset_url_or_urls: str | list[str], schema_fields: Any = None, **settings: Any) -> Reader:
    """Return a reader of any Parquet files: named tuples of arrays, one a row group, of stored values.

    dataset_url_or_urls : a directory, or a list of files: "file:///tmp/rides", "hdfs://…", "s3://…".
    settings : see `settings.Settings`.
    """
    chosen = settings_of("make_batch_reader", schema_fields, settings)
    dataset = _dataset(dataset_url_or_urls, chosen)
    try:
        schema = dataset.unischema
        warnings.warn("make_batch_reader does not decode what Petastorm wrote: read it by make_reader.", stacklevel=2)
    except PetastormMetadataError:
        schema = dataset.inferred_schema()
    return Reader(dataset, schema, chosen, batched=True)


def _dataset(url: str | list[str], settings: Settings) -> Dataset:
    if isinstance(url, list):
        if not url:
            raise ValueError("The list of files is empty.")
        urls: str | list[str] = [normalize_dir_url(each) for each in url]
    else:
        urls = normalize_dir_url(url)
    return Dataset(
        *get_filesystem_and_path_or_paths(
            urls, storage_options=settings.storage_options, filesystem=settings.filesystem
        )
    )


class Reader:
    """Iterates over rows or batches. A context manager: its threads end with it.

    schema : of what it returns.
    ngram : the `NGram` that was given.
    batched_output : whether it returns batches.
    last_row_consumed : whether all epochs have been read.
    """

    def __init__(self, dataset: Dataset, schema: Unischema, settings: Settings, *, batched: bool) -> None:
        """Choose the row groups and begin to load them. Called by `make_reader` and `make_batch_reader`."""
        self.batched_output = self.is_batched_reader = batched
        self.num_epochs = settings.num_epochs
        self.ngram = settings.schema_fields if isinstance(settings.schema_fields, NGram) else None
        stored = _stored(schema, settings, self.ngram, batched)
        transform = settings.transform_spec
        self.schema = stored if transform is None else transform_schema(stored, transform)
        self.last_row_consumed, self.stopped = False, False
        self._settings = settings
        self._parts, predicate, filters = _parts(dataset, schema, settings)
        columns = () if filters is None else _filter_columns(settings.filters, schema)
        load: Callable[..., Load] = LoadBatches if batched else LoadRows
        threads = 0 if settings.reader_pool_type == "dummy" else int(settings.workers_count)
        self._prefetch = InOrder(
            load(
                dataset=dataset,
                stored=stored,
                schema=self.schema,
                predicate=predicate,
                transform=transform,
                filters=filters,
                filter_columns=columns,
                shuffle=partial(_generator, settings.seed) if settings.shuffle_rows else None,
                ngram=self.ngram,
            ),
            threads,
            min(int(settings.workers_count) + 2, int(settings.results_queue_size)),
        )
        self._found: deque[Any] = deque()
        self._without = 0
        if not self._parts:
            warnings.warn("The reader has no row groups: none is left by filters, predicate and shard.", stacklevel=3)
        self._prefetch.start(_order(self._parts, settings))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next row or batch. RuntimeError after `stop`."""
        if self.stopped:
            raise RuntimeError("The reader has been stopped, or its `with` block has been left: it reads nothing more.")
        while not self._found:
            if self.num_epochs is None and self._without >= len(self._parts):
                raise NoDataAvailableError("num_epochs=None, and no row is left by filters, predicate and shard.")
            try:
                self._found.extend(next(self._prefetch))
            except StopIteration:
                self.last_row_consumed = True
                raise
            self._without = 0 if self._found else self._without + 1
        return self._found.popleft()

    next = __next__

    def reset(self) -> None:
        """Begin again. NotImplementedError before all rows have been read."""
        if self.stopped:
            return
        if not self.last_row_consumed:
            raise NotImplementedError("reset() is possible after all rows have been read. Make another reader instead.")
        self.last_row_consumed = False
        self._prefetch.start(_order(self._parts, self._settings))

    def stop(self) -> None:
        """Read nothing more."""
        self.stopped = True
        self._prefetch.stop()
        self._found.clear()

    def join(self) -> None:
        """Wait until the reader's threads have ended."""
        self._prefetch.join()

    def cleanup_cache(self) -> None:
        """Do nothing: there is no cache."""

    @property
    def diagnostics(self) -> dict[str, int]:
        """How many row groups are loaded and not read yet."""
        return {"output_queue_size": len(self._prefetch)}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join()


def _stored(schema: Unischema, settings: Settings, ngram: NGram | None, batched: bool) -> Unischema:
    """Return the fields that are read."""
    if ngram is not None:
        if batched:
            raise NotImplementedError("An NGram is of rows: use make_reader.")
        if not ngram.timestamp_overlap and settings.shuffle_row_drop_partitions > 1:
            raise NotImplementedError("NGram(timestamp_overlap=False) with shuffle_row_drop_partitions above 1.")
        ngram.resolve_regex_field_names(schema)
        return schema.create_schema_view(ngram.stored_fields())
    chosen = settings.schema_fields
    if chosen is None:
        return schema
    if isinstance(chosen, str) or not isinstance(chosen, Sequence | set | frozenset):
        raise ValueError(f"schema_fields={chosen!r}: a list of fields and regular expressions, or an NGram.")
    view = schema.create_schema_view(chosen)
    if not view.fields:
        raise RuntimeError(f"No field matches schema_fields={list(chosen)!r}. There is: {', '.join(schema.fields)}.")
    return view


def _parts(dataset: Dataset, schema: Unischema, settings: Settings) -> tuple[list[Part], PredicateBase | None, Any]:
    """Return what is read in an epoch, and what of predicate and filters is left to ask of the rows."""
    sharded = shards.check(settings.cur_shard, settings.shard_count)
    predicate = settings.predicate
    filters = settings.filters
    if isinstance(filters, (list, tuple)):
        filters = pq.filters_to_expression(filters)
    groups = dataset.row_groups(counted=sharded and settings.equal_shards)
    keys = set(dataset.files[0].keys)
    if predicate is not None and keys and set(predicate.get_fields()) <= keys:
        groups, predicate = [group for group in groups if _included(settings.predicate, group, schema)], None
    if sharded:
        assert settings.cur_shard is not None
        assert settings.shard_count is not None
        whole = not settings.equal_shards or predicate is not None or filters is not None
        share = shards.by_row_group if whole else shards.equal
        parts = share(groups, settings.cur_shard, settings.shard_count)
    else:
        parts = [Part(group) for group in groups]
    if (pieces := settings.shuffle_row_drop_partitions) > 1:
        parts = [
            Part(part.group, part.start, part.stop, part.repeats * (piece == pieces - 1), (piece, pieces))
            for part in parts
            for piece in range(pieces)
        ]
    return parts, predicate, filters


def _included(predicate: Any, group: RowGroup, schema: Unischema) -> bool:
    values = {name: schema.fields[name].numpy_dtype(group.file.keys[name]) for name in predicate.get_fields()}
    return bool(predicate.do_include(values))


def _filter_columns(filters: Any, schema: Unischema) -> tuple[str, ...]:
    """Return the columns that filters name: all, where they are an expression."""
    if not isinstance(filters, (list, tuple)):
        return tuple(schema.fields)
    conditions = [each for item in filters for each in ([item] if isinstance(item, tuple) else item)]
    return tuple(dict.fromkeys(condition[0] for condition in conditions))


def _order(parts: list[Part], settings: Settings) -> Iterator[tuple[Part, tuple[int, int]]]:
    """Yield what is read, epoch by epoch."""
    epoch = 0
    while parts and (settings.num_epochs is None or epoch < settings.num_epochs):
        order = np.arange(len(parts))
        if settings.shuffle_row_groups:
            order = _generator(settings.seed, (epoch, -1)).permutation(len(parts))
        yield from ((parts[number], (epoch, int(number))) for number in order)
        epoch += 1


def _generator(seed: int | None, place: tuple[int, int]) -> np.random.Generator:
    """Return the random numbers of a place: of the same seed the same, whichever thread asks first."""
    return np.random.default_rng(None if seed is None else [seed, place[0], place[1] + 1])
