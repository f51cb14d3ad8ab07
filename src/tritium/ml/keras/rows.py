"""The rows of an epoch as Keras's `fit` and `evaluate` take them (rank)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from tritium.data.batch import Batch, filled
from tritium.data.epochs import Epoch
from tritium.errors import BadRow
from tritium.ml.keras.labels import Classes
from tritium.ml.keras.settings import KerasSettings
from tritium.ml.settings import WEIGHT


class Step(NamedTuple):
    """The rows of one step."""

    step: int
    rows: int
    """The rows of this rank that count."""
    widest: int
    """The rows of every rank's batch: as many as the rank with the most has."""
    total: int
    """`rows`, over all ranks."""
    factor: float
    """The factor of the weights of the rows that count."""


class EpochRows(keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of an epoch from its first step on: (x, y), or (x, y, weights), as NumPy arrays.

    All ranks have equally many batches, and in each step batches of one size, as `KerasDataset` has them: a rank with
    fewer rows left repeats its first one with weight 0, and the weights of the others make the mean over the ranks that
    over all rows of the step.
    """

    def __init__(self, settings: KerasSettings, epoch: Epoch, rank: int, batch_size: int, classes: Classes) -> None:
        super().__init__()
        self._settings, self.epoch, self._rank, self._batch_size = settings, epoch, rank, batch_size
        self._classes, self._counts = classes, epoch.counts
        self._uneven = settings.remainder == "pad" and any(count != self._counts[0] for count in self._counts)
        self._lock = threading.Lock()  # TensorFlow takes batches ahead, in threads of its own.

    def __len__(self) -> int:
        """Return the steps that are left of the epoch, the same on every rank."""
        return max(0, self.epoch.steps - self.epoch.first)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        """Return the batch of a step, from 0, the first that is left."""
        with self._lock:
            batch = self.epoch.batch(self.epoch.first + number)
        return self._tuple(batch)

    def step(self, number: int) -> Step:
        """Return how many rows a step has, from 0, the first of the epoch."""
        size, counts = self._batch_size, self._counts
        if self._settings.remainder != "pad":
            return Step(number, size, size, size * len(counts), 1.0)
        rows_of_ranks = [max(0, min(size, count - number * size)) for count in counts]
        widest, total = max(rows_of_ranks), sum(rows_of_ranks)
        return Step(
            number, rows_of_ranks[self._rank], widest, total, len(counts) * widest / total if self._uneven else 1.0
        )

    def _tuple(self, batch: Batch) -> tuple[Any, ...]:
        step = self.step(batch.step)
        size = step.widest
        self._refuse_classes(batch)

        def column(name: str) -> np.ndarray[Any, Any]:
            values = filled(batch[name], size)
            return values if values.flags.writeable else values.copy()  # Torch warns of read-only arrays.

        inputs, labels = list(self._settings.inputs()), list(self._settings.label_sources())
        x = column(inputs[0]) if len(inputs) == 1 else {name: column(name) for name in inputs}
        several = isinstance(self._settings.label_cols, Mapping)
        y = {name: column(name) for name in labels} if several else column(labels[0])
        weights = None
        if self._uneven:
            weights = np.zeros(size, np.float32)
            weights[: batch.rows] = step.factor
        if self._settings.weight_col is not None:
            of_rows = column(WEIGHT).astype(np.float32).reshape(-1)
            weights = of_rows if weights is None else of_rows * weights
        return (x, y) if weights is None else (x, y, weights)

    def _refuse_classes(self, batch: Batch) -> None:
        """Raise BadRow for a class index that the model has no score for: Keras would compute NaN or take another."""
        for name, (scores, ignored) in self._classes.items():
            label = np.asarray(batch[name])
            wrong = (label < 0) | (label > 1 if scores is None else label >= scores)
            if ignored is not None:
                wrong &= label != ignored
            if not wrong.any():
                continue
            value = label[wrong].reshape(-1)[0].item()
            sources = self._settings.label_sources()[name]
            source = sources if isinstance(sources, str) else sources[0]
            if scores is None:
                raise BadRow(
                    f"label column {source!r} holds {value:g}, and binary_crossentropy compares one score a row with 0 "
                    "or 1. Number the two classes 0 and 1; for more of them take sparse_categorical_crossentropy and "
                    "let the last layer give a score for every class.",
                    column=source,
                    row_id=None,
                    value=value,
                )
            raise BadRow(
                f"label column {source!r} holds the class {value:g}, and the model gives {scores} scores a row, for "
                f"the classes 0 to {scores - 1}. Let its last layer give a score for every class, or number the "
                f"classes from 0: StringIndexer in Spark, df[{source!r}].astype('category').cat.codes in pandas.",
                column=source,
                row_id=None,
                value=value,
            )
