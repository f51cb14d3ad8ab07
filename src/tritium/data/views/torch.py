"""A shard as a torch `IterableDataset` and `DataLoader`, for loops that others wrote (rank). Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from inspect import signature
from itertools import cycle, islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tritium.data.batch import Batch
from tritium.data.epochs import Epoch, EpochPlan
from tritium.data.fingerprint import summary
from tritium.data.order import ORDER_VERSION
from tritium.data.schema import Field
from tritium.data.steps import Feed, check_counts, step_count
from tritium.errors import BadSetting
from tritium.hints import suggest

_ROWS_READ_AT_ONCE = 256
"""So many rows are read together where single rows are asked for."""
_EPOCHS = 1 << 62  # As many as are taken, which is not known beforehand.

Item = dict[str, Any]


class EpochSource(Protocol):
    """The part of `Shard` that a dataset needs."""

    name: str
    index: int
    feed: Feed
    schema: tuple[Field, ...]

    @property
    def counts(self) -> list[int]: ...
    def plan(self, n: Any, batch_size: Any, shuffle: Any, seed: Any, remainder: Any) -> EpochPlan: ...
    @property
    def epochs(self) -> Callable[..., Iterator[Epoch]]: ...
    def notify(self, text: str) -> None: ...


class ShardDataset(IterableDataset[Item]):
    """The batches of a shard, or its rows one by one. Each iteration is one more epoch, in another order.

    `Shard.dataset` makes it, and documents the settings.
    """

    def __init__(
        self,
        shard: EpochSource,
        batch_size: int | None,
        shuffle: Any,
        seed: int,
        remainder: str,
        device: Any,
        scale_col: str | None,
    ) -> None:
        self.batch_size = batch_size
        self._shard, self._scale_col, self._device = shard, scale_col, device
        self._plan = shard.plan(
            _EPOCHS, _ROWS_READ_AT_ONCE if batch_size is None else batch_size, shuffle, seed, remainder
        )
        self._epochs: Iterator[Epoch] | None = None
        self._epoch: Epoch | None = None
        """The latest epoch."""
        self._start = (0, 0)
        """The epoch and the step to begin at."""
        self._fingerprint: Mapping[str, Any] | None = None
        """That of the rows to which the step belongs."""
        where = f"shard {shard.name!r}: "
        if batch_size is None and (remainder != "pad" or scale_col is not None):
            setting = f"remainder={remainder!r}" if remainder != "pad" else f"scale_col={scale_col!r}"
            raise BadSetting(
                f"{where}{setting} is a setting of batches, and without batch_size= single rows are yielded"
            )
        if scale_col in {field.name for field in shard.schema}:
            raise BadSetting(f"{where}scale_col={scale_col!r} is the name of a column; choose another")

    def __len__(self) -> int:
        """Return the batches, or rows, of an epoch: the same on every rank. Waits until all shards are complete."""
        counts, plan = self._shard.counts, self._plan
        check_counts(self._shard.name, counts, plan.batch_size, plan.remainder)
        return max(counts) if self.batch_size is None else step_count(counts, plan.batch_size, plan.remainder)

    def __iter__(self) -> Iterator[Item]:
        if get_worker_info() is not None:
            raise BadSetting(self._no_workers())
        if self._epochs is None:
            self._epochs = self._begin()
        if self._epoch is not None:
            self._epoch.finish()
        self._epoch = next(self._epochs)
        yield from self._rows(self._epoch) if self.batch_size is None else self._batches(self._epoch)

    def __getstate__(self) -> Any:
        raise BadSetting(self._no_workers())

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from 0. (torch's samplers have the same method.)"""
        if epoch != self._upcoming():
            self._restart(epoch, 0, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on every rank, as JSON: the current batch counts as taken.

        Of single rows, all that were read together count as taken. Waits until all shards are complete.
        """
        number, step = self._start
        if self._epoch is not None:
            number, step = self._epoch.number, self._epoch.taken
            if step >= step_count(self._shard.counts, self._plan.batch_size, self._plan.remainder):
                number, step = number + 1, 0
        state = {"epoch": number, "step": step, **asdict(self._plan), "order": ORDER_VERSION}
        if self._shard.counts and self._shard.feed.fingerprint is not None:  # The counts arrive last.
            state["fingerprint"] = summary(self._shard.feed.fingerprint)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that `state_dict` returned on any rank.

        The epoch starts over, with a message, where batches or ranks are others than then, or its rows were streamed.
        Raises DataChanged, at the next iteration, where the rows are others.
        """
        epoch, step, plan = state["epoch"], state["step"], asdict(self._plan)
        other = [f"{name}={value!r} (was {state.get(name)!r})" for name, value in plan.items() if state[name] != value]
        if epoch == 0 and plan["shuffle"] == "stream":
            other.append("its rows were streamed")
        if step and other:
            self._shard.notify(f"shard {self._shard.name!r}: epoch {epoch + 1} starts over: {', '.join(other)}")
        self._restart(epoch, 0 if other else step, state.get("fingerprint"))

    # ---- epochs

    def _upcoming(self) -> int:
        return self._start[0] if self._epoch is None else self._epoch.number + 1

    def _restart(self, epoch: int, step: int, fingerprint: Mapping[str, Any] | None) -> None:
        self._start, self._fingerprint = (epoch, step), fingerprint
        self._epochs = self._epoch = None

    def _begin(self) -> Iterator[Epoch]:
        plan, (epoch, step) = self._plan, self._start
        settings: dict[str, Any] = {"shuffle": plan.shuffle, "seed": plan.seed, "remainder": plan.remainder}
        if epoch or step:
            state = {"epoch": epoch, "step": step, "index": self._shard.index, **asdict(plan), "order": ORDER_VERSION}
            if self._fingerprint is not None:
                state["fingerprint"] = self._fingerprint
            settings["resume"] = state
        return self._shard.epochs(_EPOCHS, batch_size=plan.batch_size, device=self._device, **settings)

    def _batches(self, epoch: Epoch) -> Iterator[Item]:
        for batch in epoch:
            epoch.finish()
            yield self._item(batch)

    def _item(self, batch: Batch) -> Any:
        item = dict(batch)
        if self._scale_col is not None:
            item[self._scale_col] = batch.scale if self._device is None else torch.tensor(batch.scale)
        return item

    def _rows(self, epoch: Epoch) -> Iterator[Item]:
        left = len(self) - epoch.first * self._plan.batch_size
        last: list[Item] = []
        for batch in epoch:
            epoch.finish()
            if batch.rows or not last:  # Any other batch only keeps the rank in step with others.
                last = [{name: column[row] for name, column in batch.items()} for row in range(max(1, batch.rows))]
            yield from last[: batch.rows]
            left -= batch.rows
        yield from islice(cycle(last), left)

    def _no_workers(self) -> str:
        return _no_workers(self._shard.name)


def _no_workers(name: str) -> str:
    return (
        f"shard {name!r} can't be read by workers of a DataLoader: each would yield all of its rows. Take "
        "num_workers=0 (of transformers: dataloader_num_workers=0): rows are mapped into memory, and a batch is one "
        "copy from there."
    )


def without_loaders(shard: str, settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the settings without those of a `DataLoader` that have its default values.

    known : the settings of `Shard.dataset`.

    Raises BadSetting for others of a `DataLoader`, with advice, and for unknown ones.
    """
    own_settings = {}
    of_torch = signature(DataLoader).parameters
    for name, value in settings.items():
        if name in known:
            own_settings[name] = value
        elif name not in of_torch:
            raise BadSetting(f"shard {shard!r}: there is no setting {name!r} of a loader.{suggest(name, known)}")
        elif value != of_torch[name].default and value not in (0, False):
            if name == "num_workers":
                raise BadSetting(_no_workers(shard))
            loader = f"DataLoader(shard.dataset(batch_size=…), batch_size=None, {name}=…)"
            fix = 'Take remainder="drop"' if name == "drop_last" else f"Make a loader of your own: {loader}"
            raise BadSetting(f"shard {shard!r}: {name}={value!r:.40} is a setting of torch's DataLoader. {fix}.")
    return own_settings


class ShardLoader(DataLoader[Item]):
    """A `DataLoader` over the batches of a shard. Its position goes into Lightning's checkpoints."""

    dataset: ShardDataset

    def __init__(self, dataset: ShardDataset, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        vars(self.sampler)["set_epoch"] = dataset.set_epoch  # Lightning, and users' own loops, look for it here.

    def state_dict(self) -> dict[str, Any]:
        """Return the position; see `ShardDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position; see `ShardDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)
