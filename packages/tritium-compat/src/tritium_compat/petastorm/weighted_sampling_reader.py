"""`WeightedSamplingReader`: rows of several readers, mixed (any process)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class WeightedSamplingReader:
    """Gives the next row of one of several readers, drawn by their probabilities, until one has no more."""

    def __init__(self, readers: Sequence[Any], probabilities: Sequence[float]) -> None:
        """Give the readers, of the same fields, and their probabilities (or weights)."""
        if len(readers) < 2 or len(readers) != len(probabilities):
            raise ValueError(f"{len(readers)} readers, {len(probabilities)} probabilities: at least two, equally many.")
        first = readers[0]
        for other in readers[1:]:
            if first.batched_output != other.batched_output:
                raise ValueError("Some of the readers return rows, some batches.")
            if set(first.schema.fields) != set(other.schema.fields):
                raise ValueError(f"The readers' fields differ: {set(first.schema.fields) ^ set(other.schema.fields)}.")
            if first.ngram != other.ngram:
                raise ValueError("The readers' NGrams differ.")
        self._readers = list(readers)
        weights = np.asarray(probabilities, float)
        self._bounds = np.cumsum(weights / weights.sum())
        self.batched_output, self.ngram, self.schema = first.batched_output, first.ngram, first.schema

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        place = int(np.searchsorted(self._bounds, np.random.random(), side="right"))
        return next(self._readers[min(place, len(self._readers) - 1)])

    next = __next__

    @property
    def last_row_consumed(self) -> bool:
        """Whether one of the readers has no more."""
        return any(reader.last_row_consumed for reader in self._readers)

    def reset(self) -> None:
        """Begin again with all readers, each of which must have been read to its end."""
        for reader in self._readers:
            reader.reset()

    def stop(self) -> None:
        """Stop all readers."""
        for reader in self._readers:
            reader.stop()

    def join(self) -> None:
        """Wait for the threads of all readers."""
        for reader in self._readers:
            reader.join()

    def __enter__(self) -> WeightedSamplingReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join()
