"""The rows of a shard in the order in which LightGBM is given them (rank)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tritium.errors import BadData, BadRow
from tritium.ml.lightgbm.settings import GROUP, INIT_SCORE, LightGBMSettings
from tritium.ml.settings import FEATURES, LABEL, WEIGHT

if TYPE_CHECKING:
    from tritium.data.shard import Shard

Array = np.ndarray[Any, Any]
_BATCH_BYTES = 16 << 20
_NUMBERS = {LABEL: "label", WEIGHT: "weight", INIT_SCORE: "init_score"}


class Rows:
    """The rows of a shard by id, or group by group and by id within a group. Features stay in the mapped files."""

    def __init__(self, shard: Shard, settings: LightGBMSettings) -> None:
        """Wait until the rows of all ranks are complete, of which this rank must have some."""
        self.count = shard.rows
        reader = self._reader = shard.reader
        reader.extend(self.count)
        self._dtype = np.dtype(settings.feature_dtype)
        features = reader.column(FEATURES)
        assert isinstance(features, np.ndarray)
        self._shape: tuple[int, ...] = features.shape[1:]
        self._features = features.reshape(self.count, -1)
        order = None if shard.by_id is None else shard.by_id(np.arange(self.count))
        if GROUP in reader.names:
            groups = self._column(GROUP, order)
            by_group = np.argsort(groups, kind="stable")
            order = by_group if order is None else order[by_group]
        self._order = order
        self._sources = next(field.sources for field in shard.schema if field.name == FEATURES)
        self._categories = _positions(settings)
        for name, role in _NUMBERS.items():
            if name in reader.names:
                self._refuse_nan(shard, name, role)

    def _refuse_nan(self, shard: Shard, name: str, role: str) -> None:
        values = self._column(name, None)
        if values.dtype.kind != "f" or not (missing := np.isnan(values.reshape(self.count, -1)).any(axis=1)).any():
            return
        column = next(field.sources for field in shard.schema if field.name == name)[0]
        row = int(self._reader.ids[int(np.argmax(missing))])
        raise BadRow(
            f"{role} column {column!r} of {shard.name!r}, row id {row}, is NaN (and {int(missing.sum()) - 1} more of "
            f"this rank's rows): only features may miss values. Drop these rows (df.dropna(subset=[{column!r}])).",
            column=column,
            row_id=row,
            value=math.nan,
        )

    @property
    def width(self) -> int:
        """The number of features."""
        return int(self._features.shape[1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row of the column of features: () of a scalar."""
        return self._shape

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
        found = self._column(INIT_SCORE, self._order)
        return found.reshape(self.count) if found.size == self.count else found

    @property
    def group_sizes(self) -> Array | None:
        """The rows of each group, int32, in the order of the rows; None without groups."""
        if GROUP not in self._reader.names:
            return None
        _, sizes = np.unique(self._column(GROUP, self._order), return_counts=True)
        return sizes.astype(np.int32)

    def features(self, positions: slice | Array) -> Array:
        """Return the features of these rows, [k, width], as LightGBM takes them."""
        rows = positions if self._order is None else self._order[positions]
        return np.ascontiguousarray(self._features[rows], self._dtype)

    def batches(self) -> Iterator[Array]:
        """Yield the features of all rows, in batches of 16 MiB. Raises BadData for a category that is no integer."""
        size = max(1, _BATCH_BYTES // max(1, self.width * self._dtype.itemsize))
        for start in range(0, self.count, size):
            batch = self.features(slice(start, min(start + size, self.count)))
            self._check(batch)
            yield batch

    def _check(self, batch: Array) -> None:
        for position in self._categories:
            values = batch[:, position]
            values = values[~np.isnan(values)]
            wrong = values[values != np.floor(values)]
            if len(wrong):
                name = self._sources[position] if len(self._sources) == self.width else self._sources[0]
                raise BadData(
                    f"column {name!r} holds {wrong[0].item()!r} and is among categorical_features, which are whole "
                    "numbers. Index it with StringIndexer, or leave it out there.",
                    column=name,
                    value=wrong[0].item(),
                )

    def _column(self, name: str, order: Array | None) -> Array:
        column = self._reader.column(name)
        assert isinstance(column, np.ndarray)
        return column if order is None else column[order]


def _positions(settings: LightGBMSettings) -> list[int]:
    names = settings.names_of_features()
    return [int(key) if names is None else names.index(str(key)) for key in settings.categorical_features or ()]
