"""The columns of a batch, gathered from mapped rows: NumPy arrays, or torch tensors on a device (rank)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tritium.data.decode import Decoder
from tritium.data.idset import place
from tritium.data.schema import Field
from tritium.data.spool import Array, Ragged, RaggedView, SpoolReader
from tritium.errors import BadRow, BadSetting

Rows = slice | Array


class Batch(Mapping[str, Any]):
    """Named columns `[b, *shape]`, and this rank's part in the step of all ranks.

    scale : the factor for the mean loss of this batch, with which the average over ranks is the mean over all rows.
    rows  : rows that count in this rank's mean (0 in a batch that only keeps the rank in step).
    total : `rows`, summed over all ranks.
    step, epoch : their numbers, from 0.
    schema : the Fields of the columns.
    decode : column → the Decoder that decoded it.
    """

    __slots__ = ("_columns", "_read", "decode", "epoch", "rows", "scale", "schema", "step", "total")

    def __init__(
        self,
        columns: dict[str, Any],
        *,
        scale: float,
        rows: int,
        total: int,
        step: int,
        epoch: int,
        read: Callable[[], dict[str, Any]] | None = None,
        schema: Sequence[Field] = (),
        decode: Mapping[str, Decoder] | None = None,
    ) -> None:
        self._columns = columns
        self._read = read
        self.scale = scale
        self.rows = rows
        self.total = total
        self.step = step
        self.epoch = epoch
        self.schema = schema
        self.decode = decode or {}

    def __getitem__(self, name: str) -> Any:
        return self._read_columns()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read_columns())

    def __len__(self) -> int:
        return len(self._read_columns())

    def with_columns(self, columns: dict[str, Any]) -> Batch:
        """Return a batch of the same rows with these columns, in place of its own."""
        part: dict[str, Any] = {"scale": self.scale, "rows": self.rows, "total": self.total}
        return Batch(columns, **part, step=self.step, epoch=self.epoch, schema=self.schema, decode=self.decode)

    def release(self) -> None:
        """Free the memory of the columns. They are read from the spool again when one is accessed."""
        if self._read is not None:
            self._columns = {}

    def _read_columns(self) -> dict[str, Any]:
        if not self._columns and self._read is not None:
            self._columns = self._read()
        return self._columns

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in self._columns.items())
        return f"Batch({shapes}; epoch {self.epoch}, step {self.step}, rows {self.rows}, scale {self.scale:g})"


class Gather:
    """A reader of the rows of batches from a spool's maps.

    name   : the name of the DataFrame, for messages.
    decode : bytes column of the batch → function from its content to an array.
    schema : the columns of the batches.
    device : None for NumPy: a range of rows is a read-only view of the map, a selection is copied (`np.take`, measured
             as fast as `torch.index_select` in RAM). Else the device of the torch tensors; those for a GPU pass through
             pinned memory. "auto": torch tensors in host memory, except for bytes, which no tensor holds.
    """

    def __init__(
        self,
        name: str,
        reader: SpoolReader,
        decode: Mapping[str, Decoder],
        device: Any,
        schema: Sequence[Field] = (),
    ) -> None:
        self.reader = reader
        self.schema = schema
        self.device = device
        self.decode = decode
        self._name = name
        self._torch: Any = None
        if device is not None:
            import torch

            self._torch = torch
            self.device = torch.device("cpu") if device == "auto" else device
        self._bytes_stay = device is None or device == "auto"
        self._type = None if device is None else str(self.device.type)
        self.ahead = self._type not in (None, "cpu")
        """Whether to prepare a batch while the previous one is used, as for any device but the CPU."""

    def take(self, rows: Rows) -> dict[str, Any]:
        """Return the columns at `rows`, still in host memory. Raises BadRow where `decode` fails,
        BadSetting for bytes that no tensor holds."""
        return {name: self._column(name, rows) for name in self.reader.names}

    def place(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the columns on the device."""
        if not self.ahead:
            return columns
        return {name: value.to(self.device, non_blocking=True) for name, value in columns.items()}

    def _column(self, name: str, rows: Rows) -> Any:
        column = self.reader.column(name)
        if isinstance(column, RaggedView):
            index = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            return self._bytes(name, column.take(index), index)
        if self._type is None:
            return column[rows] if isinstance(rows, slice) else column.take(rows, axis=0)
        if self._type != "cuda":
            return self._torch.from_numpy(column[rows].copy() if isinstance(rows, slice) else column.take(rows, axis=0))
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        dtype = self._torch.from_numpy(np.empty(0, column.dtype)).dtype
        pinned = self._torch.empty((count, *column.shape[1:]), dtype=dtype, pin_memory=True)
        if isinstance(rows, slice):
            pinned.numpy()[...] = column[rows]
        else:
            np.take(column, rows, axis=0, out=pinned.numpy(), mode="clip")
        return pinned

    def _bytes(self, name: str, rows: Ragged, index: Array) -> Any:
        if name in self.decode:
            array = self._decoded(name, rows, index)
            return array if self.device is None else self._tensor(array)
        if not self._bytes_stay:
            raise BadSetting(
                f"column {name!r} of {self._name!r} is bytes, which no tensor holds: give tr.Data(decode={{{name!r}: "
                "function}), leave the column out (columns=[...]), or take device=None"
            )
        values = np.empty(len(rows), object)
        values[:] = [row.tobytes() for row in rows.rows()]
        return values

    def _decoded(self, name: str, rows: Ragged, index: Array) -> Array:
        def bad(row: int, what: str, value: Any) -> BadRow:
            row_id = int(self.reader.ids[int(index[row])])
            column = decoder.column or name
            return BadRow(
                f"column {column!r} of {self._name!r}, {place(row_id)}, {what}",
                column=column,
                row_id=row_id,
                value=value,
                batch_column=name,
                name=self._name,
                skippable=False,
            )

        decoder = self.decode[name]
        return decoder.batch(rows, bad)

    def _tensor(self, array: Array) -> Any:
        tensor = self._torch.from_numpy(np.require(array, requirements=["C", "W"]))
        return tensor.pin_memory() if self._type == "cuda" else tensor


def checked_device(device: Any) -> Any:
    """Return None for None, else the torch.device. Raises BadSetting where this machine lacks it, or torch."""
    if device is None:
        return None
    try:
        import torch
    except ModuleNotFoundError as error:
        raise BadSetting(
            f"device={device!r} asks for batches of torch tensors, and {sys.executable} has no {error.name}. "
            "Install torch there, or take device=None for NumPy arrays."
        ) from error
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BadSetting(f"device={device!r} is no torch device: {error}") from error
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise BadSetting(f"device={device!r}, and torch {torch.__version__} finds no CUDA device on this machine")
    return checked


def filled(values: Array, rows: int) -> Array:
    """Return `values` [up to `rows`, *shape] as [rows, *shape]: their first row is repeated where they are fewer."""
    missing = rows - len(values)
    return values if missing <= 0 else np.concatenate([values, np.repeat(values[:1], missing, axis=0)])
