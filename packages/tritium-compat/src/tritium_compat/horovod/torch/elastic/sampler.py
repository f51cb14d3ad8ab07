"""`ElasticSampler`: rows that were processed are left out, and the others dealt to the ranks there are (rank)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from tritium_compat.horovod import basics


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the rows of a dataset to the ranks, and those not yet processed again when a training continues.

    Give it to `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of an epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Make a sampler of the dataset's indices; `seed` is the same on all ranks."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing has been processed. To be called at the end of the one before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of `batch_size` rows."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many rows of it all ranks have processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, maybe with another number of ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal the rows that are not processed to the ranks that there are now."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        self.indices = [*left, *left[: self.total_size - len(left)]][self.rank :: self.num_replicas]
        while len(self.indices) < self.num_samples:  # fewer rows than ranks
            self.indices.append(left[0])
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
