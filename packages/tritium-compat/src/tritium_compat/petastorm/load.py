"""Rows of a row group, read, chosen, transformed and decoded (any process; in the threads of a reader)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tritium.integration import suggest
from tritium_compat.petastorm import columns, rows
from tritium_compat.petastorm.dataset import Dataset
from tritium_compat.petastorm.ngram import NGram
from tritium_compat.petastorm.predicates import PredicateBase
from tritium_compat.petastorm.shards import Part
from tritium_compat.petastorm.transform import TransformSpec
from tritium_compat.petastorm.unischema import Unischema


class Loaded(NamedTuple):
    """What a part of a data set gave.

    found : the batches or rows.
    size : bytes.
    """

    found: list[Any]
    size: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Loads parts of a data set.

    stored, schema : the fields that are read, and those that are returned.
    filters : an expression of Arrow, and the columns that it needs.
    shuffle : of a part's number in its epoch, gives a random generator; None: rows stay in their order.
    """

    dataset: Dataset
    stored: Unischema
    schema: Unischema
    predicate: PredicateBase | None
    transform: TransformSpec | None
    filters: Any
    filter_columns: tuple[str, ...]
    shuffle: Callable[[tuple[int, int]], np.random.Generator] | None
    ngram: NGram | None = None

    def __call__(self, part: Part, place: tuple[int, int]) -> Loaded:
        """Return the batches or rows of a part. `place` is (epoch, number within it)."""
        table = self._chosen(part)
        if not table.num_rows:
            return Loaded([], 0)
        if self.shuffle is not None:
            table = table.take(self.shuffle(place).permutation(table.num_rows))
        return Loaded(self._made(table), table.nbytes)

    def _made(self, table: Any) -> list[Any]:
        raise NotImplementedError

    def _mask(self, table: Any) -> Any:
        raise NotImplementedError

    def _chosen(self, part: Part) -> Any:
        """Return the stored values of the rows that filters and predicate leave."""
        names = list(self.stored.fields)
        first = [] if self.predicate is None else list(self.predicate.get_fields())
        for name in first:
            if name not in self.stored.fields:
                raise ValueError(f"The predicate needs the field {name!r}.{suggest(name, names)}")
        if not first and not self.filter_columns:
            return self._read(part, names)
        table = self._read(part, dict.fromkeys([*first, *self.filter_columns]))
        mask = np.ones(table.num_rows, bool)
        if self.filters is not None:
            index = table.append_column("_row", pa.array(np.arange(table.num_rows))).filter(self.filters)["_row"]
            mask[:] = False
            mask[index.to_numpy()] = True
        if self.predicate is not None and mask.any():
            mask &= self._mask(table.select(first))
        kept = pa.array(mask)
        table = table.filter(kept)
        missing = [name for name in names if name not in table.column_names]
        if missing and mask.any():
            for name, column in zip(missing, self._read(part, missing).filter(kept).columns, strict=True):
                table = table.append_column(name, column)
        return table.select([name for name in names if name in table.column_names])

    def _read(self, part: Part, names: Iterable[str]) -> Any:
        """Return columns of a part as stored."""
        path, keys = part.group.file.path, part.group.file.keys
        footer = self.dataset.footer(path)
        wanted = [name for name in names if name not in keys]
        known = footer.schema.to_arrow_schema().names
        for name in wanted:
            if name not in known:
                raise ValueError(f"The file {path} has no column {name!r}.{suggest(name, known)}")
        total = footer.row_group(part.group.number).num_rows
        if wanted:
            try:
                with self.dataset.filesystem.open_input_file(path) as source:
                    file = pq.ParquetFile(source, metadata=footer, pre_buffer=True)
                    table = file.read_row_group(part.group.number, columns=wanted, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise type(error)(f"{path}, row group {part.group.number}: {error}") from error
        else:
            table = pa.table({"_": pa.nulls(total)})
        for name in names:
            if name in keys:
                table = table.append_column(name, pa.repeat(pa.scalar(keys[name]), total))
        return self._cut(part, table.select(list(names)))

    def _cut(self, part: Part, table: Any) -> Any:
        stop = table.num_rows if part.stop is None else part.stop
        table = table.slice(part.start, stop - part.start)
        place, parts = part.drop
        if parts > 1:
            start, stop = (place * table.num_rows // parts, (place + 1) * table.num_rows // parts)
            table = table.slice(start, stop - start + (self.ngram.length - 1 if self.ngram else 0))
        if part.repeats:
            table = pa.concat_tables([table, *[table.slice(table.num_rows - 1)] * part.repeats])
        return table


class LoadBatches(Load):
    """Loads a part as one named tuple of arrays."""

    def _made(self, table: Any) -> list[Any]:
        if self.transform is None:
            made = {name: columns.as_array(table.column(name), field) for name, field in self.schema.fields.items()}
            return [self.schema.make_namedtuple(**made)]
        frame = table.to_pandas()
        if self.transform.func is not None:
            frame = self.transform.func(frame)
            if not hasattr(frame, "columns"):
                raise TypeError(
                    f"The function of the TransformSpec returns {type(frame).__name__}; make_batch_reader needs a "
                    "pandas DataFrame."
                )
        if not len(frame):
            return []
        names = set(frame.columns) - set(self.transform.removed_fields)
        if self.transform.selected_fields is not None:
            names &= set(self.transform.selected_fields)
        if names != set(self.schema.fields):
            raise ValueError(
                f"The function of the TransformSpec returns the columns {sorted(names)}, and its fields are "
                f"{sorted(self.schema.fields)}. Say what it adds by edit_fields=, what it omits by removed_fields=."
            )
        made = {name: columns.from_frame(frame[name], field) for name, field in self.schema.fields.items()}
        return [self.schema.make_namedtuple(**made)]

    def _mask(self, table: Any) -> Any:
        assert self.predicate is not None
        mask = np.asarray(self.predicate.do_include(table.to_pandas()))
        if mask.shape != (table.num_rows,) or mask.dtype != bool:
            raise ValueError(
                f"The predicate returns {mask.dtype} of the shape {mask.shape} for {table.num_rows} rows. In "
                "make_batch_reader it is given whole columns (pandas Series), and returns one boolean a row."
            )
        return mask


class LoadRows(Load):
    """Loads a part as named tuples, one a row, or as n-grams."""

    def _made(self, table: Any) -> list[Any]:
        decoded = rows.decode_table(table, self.stored)
        if self.transform is None and self.ngram is None:
            # positional: three times as fast as by name
            kind = self.schema._get_namedtuple()
            return list(map(kind._make, zip(*(decoded[name] for name in self.schema.fields), strict=True)))
        made = rows.as_dicts(decoded)
        if self.transform is not None:
            made = [self._transformed(row) for row in made]
        if self.ngram is not None:
            return [self.ngram.make_namedtuple(self.schema, each) for each in self.ngram.form_ngram(made, self.schema)]
        return [self.schema.make_namedtuple(**row) for row in made]

    def _transformed(self, row: dict[str, Any]) -> dict[str, Any]:
        assert self.transform is not None
        if self.transform.func is not None:
            row = self.transform.func(row)
        left = set(self.transform.removed_fields)
        chosen = self.transform.selected_fields
        row = {name: row[name] for name in row if name not in left and (chosen is None or name in chosen)}
        if row.keys() != self.schema.fields.keys():
            raise ValueError(
                f"The function of the TransformSpec returns the fields {sorted(row)}, and should return "
                f"{sorted(self.schema.fields)}. Say what it adds by edit_fields=, what it omits by removed_fields=."
            )
        return row

    def _mask(self, table: Any) -> Any:
        assert self.predicate is not None
        chosen = self.predicate.do_include
        return np.fromiter((bool(chosen(row)) for row in rows.as_dicts(rows.decode_table(table, self.stored))), bool)
