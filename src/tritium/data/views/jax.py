"""Batches of a shard as JAX arrays over the devices of all ranks (rank)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import jax
import numpy as np

from tritium.data.batch import Batch, filled
from tritium.data.epochs import Epoch, Stopwatch
from tritium.data.spool import Array
from tritium.errors import BadRow, BadSetting


class ShardForJax(Protocol):
    """The part of `Shard` that is needed here."""

    name: str
    size: int
    trace: Stopwatch | None


class GlobalBatch(Mapping[str, Any]):
    """Named columns of the rows of all ranks in one step: a `jax.Array` [ranks × batch_size, *shape] each.

    Every rank holds its own rows. Where a rank has fewer than `batch_size` left, its first row is repeated, so that
    shapes are the same in every step.

    rows        : rows that are no repetitions, of all ranks.
    step, epoch : their numbers, from 0.
    """

    __slots__ = ("_columns", "_weights", "epoch", "read", "rows", "step")

    def __init__(self, columns: dict[str, Any], weights: Any, batch: Batch) -> None:
        self._columns, self._weights = columns, weights
        self.rows, self.step, self.epoch = batch.total, batch.step, batch.epoch
        self.read = False

    @property
    def weights(self) -> Any:
        """float32 `jax.Array` [ranks × batch_size]: 1 for a row, 0 for one that is repeated to fill the batch."""
        self.read = True
        return self._weights

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in self._columns.items())
        return f"GlobalBatch({shapes}; epoch {self.epoch}, step {self.step}, rows {self.rows})"


class GlobalEpoch:
    """The global batches of one epoch; `number`, `steps` and `len()` are those of the `Epoch`."""

    def __init__(self, epoch: Epoch, place: Placement) -> None:
        self.number = epoch.number
        self._epoch, self._place = epoch, place

    @property
    def steps(self) -> int:
        """Steps of the whole epoch, the same on every rank. Waits until the shards of all ranks are complete."""
        return self._epoch.steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[GlobalBatch]:
        for batch in self._epoch:
            whole = self._place.put(batch)
            yield whole
            self._place.check(whole)


class Placement:
    """The place of the rows of all ranks' batches: split along `axis` of the mesh, each rank's on its own devices.

    mesh : a `jax.sharding.Mesh`; None for all devices along an axis "data".
    axis : name of one of its axes, or of several; None for the first.

    Raises BadSetting where the mesh does not give every rank the place of its own rows.
    """

    def __init__(self, shard: ShardForJax, batch_size: int, mesh: Any, axis: str | Sequence[str] | None) -> None:
        self._shard, self._size = shard, batch_size
        self._rows = shard.size * batch_size
        if jax.process_count() != shard.size:
            raise BadSetting(
                f"{self._who} the gang has {shard.size} ranks, and JAX is not connected with them: its process count "
                f'is {jax.process_count()}. Launch with framework="jax".'
            )
        if mesh is None:
            mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
        axes = (mesh.axis_names[0],) if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
        if unknown := [name for name in axes if name not in mesh.axis_names]:
            raise BadSetting(f"{self._who} axis={unknown[0]!r} is none of the mesh's: {', '.join(mesh.axis_names)}.")
        parts = int(np.prod([mesh.shape[name] for name in axes]))
        if self._rows % parts:
            raise BadSetting(
                f"{self._who} the {shard.size} × {batch_size} rows of a step don't divide among {parts} devices along "
                f"{', '.join(axes)}. Take a batch_size that is a multiple of {parts // np.gcd(parts, shard.size)}."
            )
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes))
        places = self._sharding.addressable_devices_indices_map((self._rows,))
        rows_here = sum(stop - start for start, stop, _ in {index[0].indices(self._rows) for index in places.values()})
        if rows_here != batch_size:
            raise BadSetting(
                f"{self._who} along {', '.join(axes)}, this mesh gives the devices of one rank {rows_here} rows of a "
                f"step, and a rank has batch_size={batch_size}. Let the axes that split the rows go over the ranks: "
                "a mesh of JAX's devices in the shape [ranks, devices of a rank], whose first axis splits the rows."
            )

    @property
    def _who(self) -> str:
        return f"shard {self._shard.name!r}:"

    def put(self, batch: Batch) -> GlobalBatch:
        """Return this rank's batch together with those of the other ranks. Needs no communication."""
        columns = {name: filled(self._narrow(name, values), self._size) for name, values in batch.items()}
        weights = (np.arange(self._size) < batch.rows).astype(np.float32)
        with self._measured():
            arrays = {name: self._array(values) for name, values in columns.items()}
            return GlobalBatch(arrays, self._array(weights), batch)

    def check(self, batch: GlobalBatch) -> None:
        """Raise BadSetting, on every rank, where repeated rows counted as others do."""
        if batch.rows < self._rows and not batch.read:
            raise BadSetting(
                f"{self._who} step {batch.step} of epoch {batch.epoch} has {batch.rows} rows, and {self._rows} places: "
                f"the other {self._rows - batch.rows} hold repeated rows, and `batch.weights`, which is 0 there, was "
                "not used. Let the loss be sum(weights * loss of each row) / sum(weights); or take "
                'remainder="drop" or "repeat".'
            )

    def _array(self, values: Array) -> Any:
        return jax.make_array_from_process_local_data(self._sharding, values, (self._rows, *values.shape[1:]))

    def _narrow(self, name: str, values: Array) -> Array:
        """Return 64-bit columns with 32 bits unless `jax_enable_x64` is set, if every value fits."""
        if values.dtype == object:
            raise BadSetting(
                f"{self._who} column {name!r} is bytes, which no array holds: give tr.Data(decode={{{name!r}: "
                "function}), or leave the column out (columns=[...])"
            )
        if values.dtype.itemsize < 8 or jax.config.jax_enable_x64:
            return values
        if values.dtype.kind == "f":
            raise BadSetting(
                f"{self._who} column {name!r} is float64, which JAX would round to float32: set "
                'env={"JAX_ENABLE_X64": "1"} to keep it, or tr.Data(dtype="float32")'
            )
        narrow = np.dtype(f"{values.dtype.kind}4")
        limits = np.iinfo(narrow)
        if values.min() < limits.min or values.max() > limits.max:
            worst = int(values.min() if values.min() < limits.min else values.max())
            raise BadRow(
                f"column {name!r} of {self._shard.name!r} has {worst}, and JAX holds integers as {narrow} "
                f'({limits.min} to {limits.max}). Set env={{"JAX_ENABLE_X64": "1"}} to keep {values.dtype}.',
                column=name,
                row_id=None,
                value=worst,
            )
        return values.astype(narrow)

    def _measured(self) -> AbstractContextManager[None]:
        trace = self._shard.trace
        return nullcontext() if trace is None else trace.within("copy to device")


def over(epochs: Iterable[Epoch], place: Placement) -> Iterator[GlobalEpoch]:
    """Yield the epochs, of global arrays."""
    for epoch in epochs:
        yield GlobalEpoch(epoch, place)
