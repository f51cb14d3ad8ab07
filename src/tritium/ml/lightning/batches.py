"""The batches of a shard as a LightningModule takes them (rank)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tritium.data.batch import Batch
from tritium.data.views.torch import ShardDataset, ShardLoader
from tritium.ml.lightning.settings import LightningSettings
from tritium.ml.settings import LABEL, WEIGHT


class Taken(NamedTuple):
    """A batch without its columns. It has `step`, `rows`, `total` and `scale` of `tritium.data.batch.Batch`."""

    step: int
    rows: int
    total: int
    scale: float
    padded: int
    """The rows of this rank that only keep it in step with others."""


class Batches(ShardDataset):
    """The batches of a shard, in the form that the settings say. Each iteration is one more epoch."""

    def __init__(self, settings: LightningSettings, shard: Any, size: int, device: torch.device, **order: Any) -> None:
        """Take the batches of `settings.rows_per_rank(size)` rows.

        order : shuffle, seed and remainder.
        """
        super().__init__(shard, settings.rows_per_rank(size), device=device, scale_col=None, **order)
        self._settings = settings
        self.queue: deque[Taken] = deque()
        """The batches that were read and not yet trained with: Lightning may read one ahead."""
        self.inputs: dict[str, tuple[str, tuple[int, ...]]] = {}
        """dtype and shape of a row of each input, once there was a batch."""
        self.on_first: Callable[[Batch], Any] | None = None
        """Called with the first batch."""

    @property
    def current(self) -> Any:
        """The latest epoch."""
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        self.queue.clear()
        yield from super().__iter__()

    def _item(self, batch: Batch) -> Any:
        columns = dict(batch)
        if not self.inputs:
            self.inputs = {
                name: (str(columns[name].dtype).removeprefix("torch."), tuple(columns[name].shape[1:]))
                for name in self._settings.inputs()
            }
            if self.on_first is not None:
                self.on_first(batch)
        width = len(next(iter(columns.values())))
        self.queue.append(Taken(batch.step, batch.rows, batch.total, batch.scale, width - batch.rows))
        return in_form(self._settings, columns)


def loader(batches: Batches) -> ShardLoader:
    """Return the loader for a Trainer, whose position goes into Lightning's checkpoints."""
    return ShardLoader(batches, batch_size=None, collate_fn=_same)


def in_form(settings: LightningSettings, columns: dict[str, torch.Tensor]) -> Any:
    """Return the columns of a batch as `batch_form` says."""
    if settings.batch_form == "dict":
        return columns
    inputs = {name: columns[name] for name in settings.inputs()}
    labels = {name: columns[name] for name in settings.label_sources()}
    features = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    label = columns[LABEL] if list(labels) == [LABEL] else labels
    return (features, label) if settings.weight_col is None else (features, label, columns[WEIGHT])


def _same(item: Any) -> Any:
    return item
