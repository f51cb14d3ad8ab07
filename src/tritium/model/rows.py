"""The columns of rows as the arrays that a model takes, and which rows can be used (any process)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tritium.data.codec import invalid, mark_unreadable, read
from tritium.data.decode import Decode, content_of_values, contents_of, decoded, of_images, raw_values
from tritium.data.schema import Field
from tritium.data.spool import Array, Ragged
from tritium.data.types import columns_of
from tritium.errors import BadRow, ModelError
from tritium.model.bad_rows import BadRows, OnError
from tritium.model.signature import Signature
from tritium.model.table import (
    advising,
    fields,
    from_arrays,
    place_of,
    settings_of,
    with_types,
)

Decoders = Mapping[str, Decode]


@dataclass(frozen=True)
class RowReader:
    """A reader of a model's inputs from Arrow columns."""

    fields: Sequence[Field]
    """The inputs in the order of their columns."""
    decode: Decoders = field(default_factory=dict)
    """Input that is decoded → the function or the dataset that has the array of a value."""
    on_error: OnError = "fail"
    """Whether a row that can't be used raises BadRow ("fail"), or is left out; with "column" its reason is kept."""

    def read(self, columns: Sequence[pa.Array], ids: Array) -> tuple[dict[str, Array], BadRows]:
        """Return inputs `[valid rows, *shape]` by name, and the rows that can't be used."""
        try:
            return self._all(columns, ids), BadRows()
        except BadRow:
            if self.on_error == "fail":
                raise
        valid = np.ones(len(ids), np.bool_)
        for one, column in zip(self.fields, columns, strict=True):
            valid &= ~invalid(one, column)

        def all_of(rows: Array) -> dict[str, Array]:
            index = pa.array(rows)
            return self._all([column.take(index) for column in columns], ids[rows])

        return _usable(all_of, valid, self.on_error)

    def _all(self, columns: Sequence[pa.Array], ids: Array) -> dict[str, Array]:
        with advising():
            return {one.name: self._one(one, column, ids) for one, column in zip(self.fields, columns, strict=True)}

    def _one(self, one: Field, column: pa.Array, ids: Array) -> Array:
        values = read(one, column, ids)[0]
        if not isinstance(values, Ragged):
            return values
        decode = self.decode.get(one.name)
        if one.content == "image":
            decode = of_images(decode)
        if decode is None:
            raise ModelError(
                f"Input {one.name!r} is of {one.content} values, and the model has no function that decodes them: "
                f"tr.Model(…, decode={{{one.name!r}: function}})."
            )
        if not len(values):
            return np.empty((0, *(n or 0 for n in one.shape or ())), one.dtype)

        def bad(row: int, what: str, value: Any) -> BadRow:
            row_id, column_name = int(ids[row]), one.sources[0]
            return BadRow(
                f"column {column_name!r} in {place_of(row_id)} (input {one.name!r}), {what}",
                reason=f"column {column_name!r}, {what}",
                column=column_name,
                row_id=row_id,
                value=value,
                batch_column=one.name,
            )

        return decoded(decode, contents_of(values, one.content), bad, shape=one.shape)


def _usable(
    all_of: Callable[[Array], dict[str, Array]], valid: Array, on_error: OnError
) -> tuple[dict[str, Array], BadRows]:
    """Return the inputs of the rows that `all_of(rows)` can read, and the other rows.

    valid : a bool `[rows]`, in which the rows are False that are known to be bad.
    """
    reasons: dict[int, str] | None = None
    if on_error == "column":
        reasons = {int(row): _reason(all_of, int(row)) for row in np.flatnonzero(~valid)}
    mark_unreadable(all_of, valid, reasons)
    return all_of(np.flatnonzero(valid)), BadRows(None if valid.all() else valid, reasons or {})


def _reason(all_of: Callable[[Array], Any], row: int) -> str:
    try:
        all_of(np.array([row]))
    except BadRow as error:
        return error.reason or str(error)
    return ""


def arrays(
    signature: Signature, data: Any, decode: Decoders, on_error: OnError = "fail"
) -> tuple[dict[str, Array], BadRows]:
    """Return the result of `RowReader.read` for any table or array that `Model.predict` takes.

    Raises SignatureMismatch with every difference, and BadRow for a value that can't be used.
    """
    if _is_table(data):
        return _from_table(signature, data, decode, on_error)
    try:
        return from_arrays(signature, _decoded(signature, data, decode)), BadRows()
    except BadRow:
        if on_error == "fail":
            raise
    by_input = data if isinstance(data, Mapping) else {signature.inputs[0].name: data}

    def all_of(rows: Array) -> dict[str, Array]:
        some = {name: _taken(values, rows) for name, values in by_input.items()}
        return from_arrays(signature, _decoded(signature, some, decode)) if len(rows) else _no_rows(signature)

    return _usable(all_of, np.ones(len(next(iter(by_input.values()))), np.bool_), on_error)


def _no_rows(signature: Signature) -> dict[str, Array]:
    return {one.name: np.empty((0, *(n or 0 for n in one.shape)), one.dtype) for one in signature.inputs}


def _taken(values: Any, rows: Array) -> Any:
    """Return these rows of an array, a tensor or a list."""
    return values[rows] if hasattr(values, "ndim") else [values[row] for row in rows]


def _decoded(signature: Signature, data: Any, decode: Decoders) -> Any:
    """Return `data` for `from_arrays`, with arrays in place of the lists of values that the model decodes."""
    if not decode:
        return data
    if not isinstance(data, Mapping):
        name = signature.inputs[0].name
        return _decoded(signature, {name: data}, decode)[name] if len(signature.inputs) == 1 else data
    arrays_by_name = dict(data)
    for taken in signature.inputs:
        values = raw_values(data.get(taken.name)) if taken.name in decode else None
        if values is None or taken.codec.get("content") not in (None, content_of_values(values)):
            continue

        def bad(row: int, what: str, value: Any, name: str = taken.name) -> BadRow:
            return BadRow(
                f"input {name!r}, row {row}, {what}",
                reason=f"input {name!r}, {what}",
                column=name,
                row_id=row,
                value=value,
                batch_column=name,
            )

        arrays_by_name[taken.name] = decoded(decode[taken.name], values, bad, shape=taken.shape)
    return arrays_by_name


def _is_table(data: Any) -> bool:
    return isinstance(data, pa.Table | pa.RecordBatch) or (hasattr(data, "iloc") and hasattr(data, "columns"))


def _from_table(
    signature: Signature, data: Any, decode: Decoders, on_error: OnError
) -> tuple[dict[str, Array], BadRows]:
    from tritium.data.tables import Tables, column_of, table_of

    codecs = [(taken.columns, taken.codec.get("nulls") or ()) for taken in signature.inputs]
    filled = {name for names, fills in codecs for name, fill in zip(names, fills, strict=False) if fill is not None}
    table = with_types(signature, table_of(data, "predict", filled))
    known = columns_of(table.schema)
    planned = fields(signature, table.schema)
    reader = RowReader([planned[taken.name] for taken in signature.inputs], decode)
    settings = {i.name: settings_of(i, known) for i in signature.inputs}

    def rows_of(rows: pa.Table) -> dict[str, Array]:
        inputs = {name: dataclasses.replace(one, frame=rows) for name, one in settings.items()}
        batches = [Tables({name: one}, 1).batches(0) for name, one in inputs.items()]
        parts_read: list[dict[str, Array]] = []
        # The last batch is the anchor's, which has no rows.
        while not parts_read or len(parts_read[-1][signature.inputs[0].name]):
            with advising():
                parts = [next(iterator) for iterator in batches]
            ids = parts[0].column(0).to_numpy()
            columns = [part.column(2).drop_null().field(0) for part in parts]
            parts_read.append(reader.read(columns, ids[: len(columns[0])])[0])
        return {name: np.concatenate([rows[name] for rows in parts_read[:-1] or parts_read]) for name in inputs}

    if on_error == "fail":
        return rows_of(table), BadRows()
    valid = np.ones(len(table), np.bool_)
    for one in reader.fields:
        for source in one.sources:
            valid &= ~invalid(_alone(one, source), column_of(table, source))

    def all_of(rows: Array) -> dict[str, Array]:
        return rows_of(table.take(pa.array(rows)))

    return _usable(all_of, valid, on_error)


def _alone(one: Field, source: str) -> Field:
    """Return the Field of one source of a packed one; any other as it is."""
    if not one.packed:
        return one
    number = one.sources.index(source)
    exact = one.exact[number : number + 1]
    return dataclasses.replace(one, packed=False, depth=0, nulls=(one.nulls[number],), exact=exact)
