"""The rows of a shard in the order in which LightGBM is given them (rank)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tritium.data.idset import place
from tritium.errors import BadData, BadRow
from tritium.ml.lightgbm.features import Features
from tritium.ml.lightgbm.settings import GROUP, INIT_SCORE, LightGBMSettings
from tritium.ml.settings import LABEL, WEIGHT

if TYPE_CHECKING:
    from tritium.data.shard import Shard

Array = np.ndarray[Any, Any]
_BATCH_BYTES = 16 << 20
_MOST_ID = 1 << 31  # LightGBM makes a 32-bit integer of a category.


class ShardRows:
    """The rows of a shard by id, or group by group and by id within a group. Features stay in the mapped files."""

    def __init__(self, shard: Shard, settings: LightGBMSettings, slots: Mapping[str, tuple[str, ...]]) -> None:
        """Wait until the rows of all ranks are complete, of which this rank must have some.

        slots : batch column → the names of its numbers, where the driver has found them in the metadata.
        """
        self.count, self._name = shard.rows, shard.name
        reader = self._reader = shard.reader
        reader.extend(self.count)
        self._dtype = np.dtype(settings.feature_dtype)
        self._fields = {field.name: field for field in shard.schema}
        fields = [replace(self._fields[name], slots=slots.get(name, ())) for name in settings.inputs()]
        arrays = {field.name: self._column(field.name, None) for field in fields}
        self.inputs = {name: (fields[i].dtype, array.shape[1:]) for i, (name, array) in enumerate(arrays.items())}
        """Batch column → dtype and shape of a row."""
        self._parts = [array.reshape(self.count, -1) for array in arrays.values()]
        self.features = Features.of(fields, {name: math.prod(shape) for name, (_, shape) in self.inputs.items()})
        order = None if shard.by_id is None else shard.by_id(np.arange(self.count))
        if GROUP in reader.names:
            groups = self._column(GROUP, order)
            by_group = np.argsort(groups, kind="stable")
            order = by_group if order is None else order[by_group]
        self._order = order
        self.largest_category = 0
        """Of the batches so far."""
        self._categories = self.features.categories(settings)
        for name in (LABEL, WEIGHT, INIT_SCORE):
            if name in reader.names:
                self.refuse(name, np.isnan, "only features may miss values")
                self.refuse(name, np.isinf, "only features may be infinite")
        if WEIGHT in reader.names:
            self.refuse(WEIGHT, lambda values: values < 0, "a weight is at least 0")

    def refuse(self, name: str, wrong: Callable[[Array], Array], why: str) -> None:
        """Raise BadRow for the first row whose value in a batch column is `wrong`.

        wrong : from values [rows, n] to bools of that shape.
        why   : the end of the message's sentence.
        """
        values = self._column(name, None).reshape(self.count, -1)
        rows = wrong(values).any(axis=1)
        if not rows.any():
            return
        first = int(np.argmax(rows))
        at = int(np.argmax(wrong(values[first])))
        sources = self._fields[name].sources
        column, value = sources[at] if self._fields[name].packed else sources[0], values[first, at].item()
        row, missing = int(self._reader.ids[first]), math.isnan(value)
        shown, how = ("NaN", f" (df.dropna(subset=[{column!r}]))") if missing else (f"{value:g}", "")
        raise BadRow(
            f"{name} column {column!r} of {self._name!r}, {place(row)}, is {shown} (and {int(rows.sum()) - 1} more of "
            f"this rank's rows): {why}. Drop these rows{how}.",
            column=column,
            row_id=row,
            value=value,
            name=self._name,
            skippable=False,
        )

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.features.names)

    @property
    def ids(self) -> Array:
        """The ids, int64 [rows]."""
        return self._reader.ids if self._order is None else self._reader.ids[self._order]

    @property
    def label(self) -> Array:
        """The labels [rows]."""
        return self._column(LABEL, self._order).reshape(self.count)

    @property
    def weight(self) -> Array | None:
        """The weights, float32 [rows], or None."""
        return self._column(WEIGHT, self._order) if WEIGHT in self._reader.names else None

    @property
    def init_score(self) -> Array | None:
        """The scores to begin with, float64 [rows] or [rows, classes], or None."""
        if INIT_SCORE not in self._reader.names:
            return None
        scores = self._column(INIT_SCORE, self._order)
        return scores.reshape(self.count) if scores.size == self.count else scores

    @property
    def group_sizes(self) -> Array | None:
        """The rows of each group, int32, in the order of the rows; None without groups."""
        if GROUP not in self._reader.names:
            return None
        _, sizes = np.unique(self._column(GROUP, self._order), return_counts=True)
        return sizes.astype(np.int32)

    def matrix(self, positions: slice | Array) -> Array:
        """Return the features of these rows, [k, width], as LightGBM takes them."""
        rows = positions if self._order is None else self._order[positions]
        parts = [part[rows] for part in self._parts]
        return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1), self._dtype)

    def batches(self) -> Iterator[Array]:
        """Yield the features of all rows, in batches of 16 MiB. Raises BadData for a category that is no integer."""
        size = max(1, _BATCH_BYTES // max(1, self.width * self._dtype.itemsize))
        for start in range(0, self.count, size):
            batch = self.matrix(slice(start, min(start + size, self.count)))
            self._check(batch)
            yield batch

    def _check(self, batch: Array) -> None:
        for position in self._categories:
            values = batch[:, position]
            values = values[~np.isnan(values)]
            for wrong, why in ((values != np.floor(values), "whole numbers"), (values >= _MOST_ID, "below 2**31")):
                if wrong.any():
                    column, value = self.features.columns[position], values[wrong][0].item()
                    raise BadData(
                        f"column {column!r} holds {value!r} and is among categorical_features, which are {why}. "
                        "Index it with StringIndexer, or leave it out there.",
                        column=column,
                        value=value,
                    )
            self.largest_category = max(self.largest_category, int(values.max(initial=0)))

    def _column(self, name: str, order: Array | None) -> Array:
        column = self._reader.column(name)
        assert isinstance(column, np.ndarray)
        return column if order is None else column[order]
