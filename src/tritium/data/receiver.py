"""The receiver of one rank's rows: from Spark's Arrow stream, checked, into the spools (supervisor)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tritium.data.codec import invalid, mark_unreadable, read
from tritium.data.fingerprint import Fingerprint, Part
from tritium.data.schema import Field
from tritium.data.spool import Ragged, Spool
from tritium.errors import BadRow, DataError, IncompleteShard
from tritium.spark.inside.end_of_stream import TRIED

Array = np.ndarray[Any, Any]
Columns = dict[str, Array | Ragged]


@dataclass(frozen=True)
class Receipt:
    """The contents of a complete shard, by the name of the DataFrame."""

    rows: dict[str, int]
    fingerprint: dict[str, dict[int, Part]]
    """Name → source partition → (rows, sum of hashes)."""
    columns: dict[str, list[dict[str, Any]]]
    """Name → `Spool.describe()`, with every shape known unless there are no rows."""
    skipped: dict[str, int]
    """Name → rows that were left out, as they can't be read; only names with such rows."""
    first: dict[str, str]
    """Name → the problem of the first of them."""


class Receiver:
    """A receiver that checks the Arrow batches of one rank as they arrive, and spools them segment by segment.

    plan   : Fields by name. A batch has the columns `_id`, `_anchor`, and one nullable struct per name in this order.
    spools : by the same names.
    sorted : whether the JVM sorted the rows by id, so that the anchor, which has the highest id, must come last.
    """

    def __init__(self, plan: Mapping[str, Sequence[Field]], spools: Mapping[str, Spool], *, sorted: bool) -> None:
        self._plan = plan
        self._spools = spools
        self._sorted = sorted
        self.rows: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        self.rows.update(dict.fromkeys(self._plan, 0))
        self._fields = {name: list(fields) for name, fields in self._plan.items()}
        self._fingerprints = {name: Fingerprint() for name in self._plan}
        self._skipped: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self._last_id = -1
        self._anchors = 0

    def restart(self) -> None:
        """Drop the rows taken so far: others take their place."""
        for spool in self._spools.values():
            spool.clear()
        self._begin()

    def take(self, batch: pa.RecordBatch) -> None:
        """Decode and check a batch, and append its rows to the spools as one committed segment for each name.

        Raises BadRow, and IncompleteShard where sorted rows come out of order.
        """
        if not batch.num_rows:
            return
        ids = batch.column(0).to_numpy()
        if self._sorted:
            self._check_order(ids)
        anchors = batch.num_rows - batch.column(1).null_count
        if self._sorted and anchors and not batch.column(1)[-1].is_valid:
            raise self._disorder(f"row {ids[-1]} came after the anchor")
        self._anchors += anchors
        for position, name in enumerate(self._fields, start=2):
            struct = batch.column(position)
            if struct.null_count < len(struct):
                self._take(name, struct, ids)

    def _take(self, name: str, struct: pa.StructArray, ids: Array) -> None:
        present = None
        if struct.null_count:  # The children of a null struct may hold anything.
            present = struct.is_valid()
            ids = ids[present.to_numpy(zero_copy_only=False)]
        arrays = [struct.field(index) for index in range(len(self._fields[name]))]
        if present is not None:
            arrays = [column.filter(present) for column in arrays]
        fields = self._fields[name]
        try:
            columns, fields = _read(fields, arrays, ids)
        except BadRow as error:
            if not fields[0].skip:
                raise BadRow(f"data {name!r}: {error}", **error.__dict__, name=name) from None
            self._first.setdefault(name, str(error))
            rows, fields = readable(fields, arrays, ids)
            self._skipped[name] = self._skipped.get(name, 0) + len(ids) - len(rows)
            if not len(rows):
                return
            ids, arrays = ids[rows], [column.take(pa.array(rows)) for column in arrays]
            columns, fields = _read(fields, arrays, ids)
        self._fields[name] = fields
        self._spools[name].append(ids, columns)
        self._fingerprints[name].add(ids, columns)
        self.rows[name] = self._spools[name].commit()

    def _check_order(self, ids: Array) -> None:
        if self._anchors or ids[0] <= self._last_id or (ids[1:] <= ids[:-1]).any():
            raise self._disorder(f"a batch from id {ids[0]} to {ids[-1]} came after id {self._last_id}")
        self._last_id = int(ids[-1])

    def _disorder(self, what: str) -> IncompleteShard:
        return IncompleteShard(
            f"rows came out of order: {what}, so the end of the shard can't be recognised ({self.rows} so far). This "
            "Spark does not keep `sortWithinPartitions`: please report it with its version.",
            rows=dict(self.rows),
        )

    def cut_short(self) -> IncompleteShard:
        """Return the error for a stream that ended or broke off before the shard was complete."""
        return IncompleteShard(
            f"Spark ended the rows of this rank early: {self.rows} came, and the "
            f"{'last one' if self._anchors != 1 else 'confirmation of their end'} is missing. Map output was "
            "probably lost with its executor or disk: launch again. If it happens again, look for lost "
            "executors in the Spark UI.",
            rows=dict(self.rows),
        )

    def finish(self, *, confirmed: bool | None) -> Receipt:
        """Return the receipt of a complete shard.

        confirmed : the result of `stream_is_complete`, the proof for unsorted rows.

        Raises IncompleteShard where Spark's stream ended before the shard was complete, DataError if unknown.
        """
        if not self._sorted and confirmed is None:
            raise DataError(
                "It can't be told whether all rows of this rank came: Spark's Python worker here is not as in the "
                f"versions that were tried ({', '.join(v + 'x' for v in TRIED)}). With "
                "spark.conf.set('spark.tritium.inside', '-end_of_stream') and shuffle=\"full\" Spark sorts the rows of "
                "each rank, which proves their end. Please report it with the version of Spark."
            )
        if self._anchors != 1 or not (self._sorted or confirmed):
            raise self.cut_short()
        return Receipt(
            rows=dict(self.rows),
            fingerprint={name: dict(sums.parts) for name, sums in self._fingerprints.items()},
            columns={name: spool.describe() for name, spool in self._spools.items()},
            skipped=dict(self._skipped),
            first=dict(self._first),
        )


def _read(fields: Sequence[Field], arrays: Sequence[pa.Array], ids: Array) -> tuple[Columns, list[Field]]:
    """Return the batch columns of these rows, and the fields with every shape known. Raises BadRow."""
    columns: Columns = {}
    known = []
    for field, column in zip(fields, arrays, strict=True):
        values, mask = read(field, column, ids)
        columns[field.name] = values
        if mask is not None:
            columns[f"{field.name}_mask"] = mask
        if field.shape is None and not isinstance(values, Ragged):
            field = dataclasses.replace(field, shape=values.shape[1:])
        known.append(field)
    return columns, known


def readable(fields: Sequence[Field], arrays: Sequence[pa.Array], ids: Array) -> tuple[Array, list[Field]]:
    """Return the rows `[k]` that can be read, and the fields with the shapes of the first of them."""
    valid = np.ones(len(ids), np.bool_)
    for field, column in zip(fields, arrays, strict=True):
        valid &= ~invalid(field, column)
    known = list(fields)

    def of(rows: Array) -> tuple[Columns, list[Field]]:
        return _read(known, [column.take(pa.array(rows)) for column in arrays], ids[rows])

    for row in np.flatnonzero(valid):
        try:
            _, known = of(np.array([row]))
            break
        except BadRow:
            valid[row] = False
    for before, field, column in zip(fields, known, arrays, strict=True):
        if field is not before:  # The first row has shown how long the arrays are.
            valid &= ~invalid(field, column)
    mark_unreadable(of, valid)
    return np.flatnonzero(valid), known
