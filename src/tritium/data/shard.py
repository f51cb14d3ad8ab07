"""A shard: the rows of a named DataFrame that one rank trains on, as epochs of batches (rank)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import numpy as np

from tritium.data.batch import Batch, Gather, checked_device
from tritium.data.decode import Decode, by_batch_column
from tritium.data.epochs import Epoch, EpochPlan, Epochs, OnBatch, OnEpochEnd, Stopwatch
from tritium.data.idset import IdSet
from tritium.data.order import Lookup, by_id
from tritium.data.schema import Field
from tritium.data.spool import Spool, SpoolReader
from tritium.data.steps import REMAINDERS, Feed, Watermark, check_counts, step_count
from tritium.errors import BadSetting
from tritium.hints import did_you_mean

if TYPE_CHECKING:
    from tritium.data.views.jax import GlobalEpoch
    from tritium.data.views.keras import Columns, KerasDataset
    from tritium.data.views.torch import ShardDataset, ShardLoader

Description = Sequence[Mapping[str, Any]]
SHUFFLES = ("full", "stream", True, False)
_SPAN = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")
in_use: WeakSet[Shard] = WeakSet()
"""The shards that `World.shard` has returned in this process, until they are closed."""


class Shard:
    """The rows of the DataFrame `name` that one rank trains on.

    description : `Spool.describe()`, or a function that waits for it, or an open SpoolReader.
    index, size : the number of this shard, from 0, and of all; rank and world size, unless ranks share a shard.
    feed        : the watermark of the rows of all shards.
    decode      : bytes column, by its name in the batch or in the DataFrame → function from its content to an array.
    tensors     : whether device="auto" gives torch tensors.
    prepared    : the order that the exchange prepared: "full" or False (all rows at once) or "stream" (as they arrive).
    on_epoch_end: called at the end of every epoch with its counts (rows used, padded, dropped, repeated).
    on_batch    : called with the epoch and step of every batch, both from 0.
    on_message  : called with a sentence for the user, on index 0 only.
    trace       : measures the parts of each step's time.
    window      : the least number of rows that "stream" permutes together.
    memory      : bytes of this shard that may stay in memory (the page cache); a larger shard is permuted by blocks
                  of that size. None: half of what the machine or its container has.
    """

    def __init__(
        self,
        name: str,
        description: Description | Callable[[], Description] | SpoolReader,
        fields: Sequence[Field],
        *,
        index: int,
        size: int,
        feed: Feed,
        decode: Mapping[str, Decode] | None = None,
        tensors: bool = False,
        prepared: Literal["full", "stream"] | bool = "full",
        on_epoch_end: OnEpochEnd | None = None,
        on_batch: OnBatch | None = None,
        on_message: Callable[[str], None] | None = None,
        trace: Stopwatch | None = None,
        window: int = 16_384,
        memory: int | None = None,
    ) -> None:
        self.name = name
        self.index = index
        self.size = size
        self.schema = tuple(fields)
        """The batch columns."""
        self._description = description
        self.feed = feed
        self._decode = dict(decode or {})
        self.decode = by_batch_column(self._decode, fields)
        """By batch column."""
        self._tensors = tensors
        self._prepared = prepared
        self._on_epoch_end = on_epoch_end
        self.on_batch = on_batch
        self._on_message = on_message
        self.trace = trace
        self._window = window
        self._memory = memory
        self._history: list[dict[str, Any]] = []
        self._epochs: Epochs | None = None

    @classmethod
    def of(cls, name: str, spool: Spool, fields: Sequence[Field], **settings: Any) -> Shard:
        """Return the only shard (index 0 of 1) over a spool whose rows are all committed."""
        feed = Feed()
        feed.publish(Watermark(spool.rows, {0: spool.rows}, 1))
        return cls(name, spool.describe(), fields, index=0, size=1, feed=feed, **settings)

    @property
    def counts(self) -> list[int]:
        """Rows of every shard, in the order of indices. Waits until all are complete."""
        return self.feed.counts()

    @property
    def rows(self) -> int:
        """Rows of this shard. Waits until all shards are complete."""
        return self.counts[self.index]

    def epochs(
        self,
        n: int,
        *,
        batch_size: int,
        shuffle: Literal["full", "stream"] | bool | None = None,
        seed: int = 0,
        remainder: Literal["pad", "drop", "repeat"] = "pad",
        device: Any = "auto",
        resume: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        if_changed: Literal["refuse", "restart"] = "refuse",
    ) -> Iterator[Epoch]:
        """Return an iterator over `n` epochs of batches of `batch_size` rows, with equally many steps on every rank.

        shuffle   : "full" (a seeded permutation of all rows), "stream" (the first epoch in the order of arrival,
                    permuted within windows, while rows still arrive; then as "full"), False (by id). None: as prepared.
        remainder : "pad" (the last batches may be short, or one row of scale 0), "drop", "repeat".
        device    : the device of the torch tensors of a batch; None for NumPy arrays. "auto": tensors in host memory
                    where the function uses torch (or framework="torch"), else NumPy arrays.
        resume    : the `state()` of this rank: continues with exactly the rows not yet seen. A list of the
                    states of all ranks, in rank order, also continues at another world size. Where Spark has given
                    the same rows other ids since, the epoch restarts, with a message.
        if_changed: where the rows differ from those of the state, "refuse" them, or "restart" its epoch on them. After
                    the last epoch none is left to restart, and they are refused.

        Raises BadSetting at once; at the first epoch, the same on every rank, EmptyShard and DataChanged.
        """
        if if_changed not in ("refuse", "restart"):
            raise BadSetting(f"shard {self.name!r}: " + _unknown("if_changed", if_changed, ("refuse", "restart")))
        plan = self.plan(n, batch_size, shuffle, seed, remainder)
        if isinstance(device, str) and device == "auto":
            place = "auto" if self._tensors and find_spec("torch") is not None else None
        else:
            place = checked_device(device)
        self._epochs = Epochs(self, int(n), plan, place, resume, if_changed)
        return iter(self._epochs)

    def jax(
        self,
        n: int,
        *,
        batch_size: int,
        mesh: Any = None,
        axis: str | Sequence[str] | None = None,
        **settings: Any,
    ) -> Iterator[GlobalEpoch]:
        """Return `epochs(n, batch_size=…)` of batches that are arrays over the devices of all ranks: see GlobalBatch.

        mesh     : a `jax.sharding.Mesh` of the devices of all ranks; None: all of them along an axis "data".
        axis     : the axis of the mesh, or several, along which the rows are split; None: the first.
        settings : as those of `epochs`, but for `device`.
        """
        from tritium.data.views.jax import Placement, over

        epochs = self.epochs(n, batch_size=batch_size, device=None, **settings)
        return over(epochs, Placement(self, batch_size, mesh, axis))

    def dataset(
        self,
        *,
        batch_size: int | None = None,
        shuffle: Literal["full", "stream"] | bool | None = None,
        seed: int = 0,
        remainder: Literal["pad", "drop", "repeat"] = "pad",
        device: Any = "auto",
        scale_col: str | None = None,
    ) -> ShardDataset:
        """Return the rows as a torch `IterableDataset`, of which each iteration is one more epoch.

        batch_size: rows of the batches it yields, as dicts of columns. None: it yields single rows, for a loader that
                    makes batches itself; every rank yields equally many, so a shorter shard repeats some of its last.
        scale_col : the name under which a batch also holds its `scale`, a tensor of one number.

        The others as of `epochs`; the columns are torch tensors unless device=None. Raises BadSetting at once.
        """
        from tritium.data.views.torch import ShardDataset

        self._tensors = True  # The function uses torch, also where that was not seen before it was called.
        return ShardDataset(self, batch_size, shuffle, seed, remainder, device, scale_col)

    def loader(self, *, batch_size: int, **settings: Any) -> ShardLoader:
        """Return a torch `DataLoader` over the batches of `dataset(batch_size=…)`, whose settings it takes.

        Its length is the number of steps of an epoch, the same on every rank. Raises BadSetting for a setting that only
        torch's own `DataLoader` has, such as num_workers=2.
        """
        from tritium.data.views.torch import ShardLoader, without_loaders

        known = [name for name in signature(self.dataset).parameters if name != "batch_size"]
        settings = without_loaders(self.name, settings, known)
        return ShardLoader(self.dataset(batch_size=batch_size, **settings), batch_size=None)

    def keras(self, *, batch_size: int, x: Columns, y: Columns | None = None, **settings: Any) -> KerasDataset:
        """Return this shard as a `keras.utils.PyDataset` for `fit` and `evaluate`, with equal steps on every rank.

        x, y     : a column; a list of columns; or the name of a model's input or output → column.
        settings : sample_weight (a column of weights), and shuffle, seed and remainder as those of `epochs`.
        """
        from tritium.data.views.keras import dataset_of

        return dataset_of(self, batch_size=batch_size, x=x, y=y, **settings)

    def tensorflow(self, *, batch_size: int, columns: Any = None, **settings: Any) -> Any:
        """Return a `tf.data.Dataset` of this rank's batches: each iteration over it is one epoch, from the first on.

        All tensors are [batch_size, *shape]. Where a rank has fewer rows left, its first row is repeated, with the
        weight 0; the other rows of the step weigh so much that the average over ranks is the mean over all rows.

        columns  : which columns, nested as the elements shall be, such as ("x", "y") or {"in": ("a", "b")}; None: a
                   dict of all. With remainder="pad", the weights come third after two columns, and elsewhere as the
                   column "sample_weight".
        settings : as those of `epochs`, but for `n` and `device`.

        Raises BadSetting; EmptyShard, the same on every rank.
        """
        from tritium.data.views.tensorflow import Elements, dataset, types

        epochs = iter(self.epochs(sys.maxsize, batch_size=batch_size, device=None, **settings))
        assert self._epochs is not None
        plan = self._epochs.plan
        steps = None
        if plan.shuffle != "stream":
            check_counts(self.name, self.counts, batch_size, plan.remainder)
            self.reader.extend(self.rows)
            steps = step_count(self.counts, batch_size, plan.remainder) if settings.get("resume") is None else None
        read = types({name: self.reader.column(name) for name in self.reader.names}, dict(self.decode))
        elements = Elements(self.name, self.size, batch_size, columns, read, plan.remainder == "pad")
        return dataset(epochs, elements, self.size, steps)

    def peek(self, rows: int = 2) -> Batch:
        """Return up to so many of the first rows as a batch of NumPy arrays, without taking a batch of an epoch.

        Waits until all shards are complete. Raises EmptyShard, the same on every rank.
        """
        check_counts(self.name, self.counts, 1, "pad")
        self.reader.extend(self.rows)
        gather = Gather(self.name, self.reader, self.decode, None, self.schema)
        count = min(rows, self.rows)
        part: dict[str, Any] = {"scale": 1.0, "rows": count, "total": count, "step": 0, "epoch": 0}
        return Batch(gather.take(slice(0, count)), **part, schema=self.schema, decode=self.decode)

    def alone(self) -> Shard:
        """Return this shard's rows as the only shard, so that the steps depend on no other rank.

        Both share this shard's maps: closing either closes them. Waits until all shards are complete.
        """
        feed = Feed()
        feed.publish(Watermark(self.rows, {0: self.rows}, 1))
        return Shard(
            self.name,
            self.reader,
            self.schema,
            index=0,
            size=1,
            feed=feed,
            decode=self._decode,
            tensors=self._tensors,
            prepared=self._prepared,
            on_epoch_end=self._on_epoch_end,
            on_batch=self.on_batch,
            on_message=self._on_message,
            trace=self.trace,
            window=self._window,
            memory=self._memory,
        )

    def state(self) -> dict[str, Any]:
        """Return the position of the latest `epochs()` as JSON; the current batch counts as taken.

        Waits until the shards of all ranks are complete. Raises BadSetting before the first `epochs()`.
        """
        if self._epochs is None:
            raise BadSetting(f"shard {self.name!r} has no position before epochs() is called")
        return self._epochs.state()

    def report(self) -> list[dict[str, Any]]:
        """Return, for each epoch that was taken to its end, the rows used, padded, dropped and repeated."""
        return list(self._history)

    def close(self) -> None:
        """Release the maps."""
        in_use.discard(self)
        if "reader" in self.__dict__:
            self.reader.close()

    @cached_property
    def reader(self) -> SpoolReader:
        """The mapped columns. Waits until the first row has shown their shapes."""
        description = self._description
        if isinstance(description, SpoolReader):
            return description
        return SpoolReader(description() if callable(description) else description, 0)

    @cached_property
    def by_id(self) -> Lookup | None:
        """Position among the rows sorted by id → row in the spool; None where both are the same.

        Waits until all shards are complete.
        """
        self.reader.extend(self.rows)
        return by_id(self.reader.ids)

    @cached_property
    def packed_ids(self) -> list[str]:
        """All ids, in pieces, as text. Waits until all shards are complete."""
        self.reader.extend(self.rows)
        ids = self.reader.ids
        return [IdSet.of(ids[start : start + _SPAN]).pack() for start in range(0, len(ids), _SPAN)]

    @cached_property
    def block(self) -> int:
        """Rows that are permuted together: as many as memory holds. Waits until all shards are complete."""
        self.reader.extend(self.rows)
        memory = memory_limit() // 2 if self._memory is None else self._memory
        return max(1, memory // max(1, self.reader.row_bytes))

    def first_row(self) -> dict[str, np.ndarray[Any, Any]] | None:
        """Return the columns `[1, *shape]` of a row of this shard, decoded; None where it has none. Takes no row.

        Waits until every shard has a row or has ended. Raises BadRow where `decode` fails.
        """
        if self.feed.wait(1).ended.get(self.index) == 0:
            return None
        self.reader.extend(1)
        return Gather(self.name, self.reader, self.decode, None, self.schema).take(slice(0, 1))

    def record(self, counts: dict[str, Any]) -> None:
        """Keep an epoch's counts of rows for `report()`, and pass them to `on_epoch_end`."""
        self._history.append(counts)
        if self._on_epoch_end is not None:
            self._on_epoch_end(counts)

    def notify(self, text: str) -> None:
        """Pass a sentence for the user to `on_message`, once for all ranks."""
        if self._on_message is not None and self.index == 0:
            self._on_message(text)

    def plan(self, n: Any, batch_size: Any, shuffle: Any, seed: Any, remainder: Any) -> EpochPlan:
        """Return the settings of `epochs` that decide the order of rows, checked. Raises BadSetting."""
        where = f"shard {self.name!r}: "
        for setting, value, least in (("n", n, 0), ("batch_size", batch_size, 1)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise BadSetting(f"{where}{setting}={value!r} must be a whole number of at least {least}")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise BadSetting(f"{where}seed={seed!r} must be a whole number")
        if remainder not in REMAINDERS:
            raise BadSetting(where + _unknown("remainder", remainder, REMAINDERS))
        shuffle = self._prepared if shuffle is None else shuffle
        if not isinstance(shuffle, str | bool) or shuffle not in SHUFFLES:
            raise BadSetting(where + _unknown("shuffle", shuffle, SHUFFLES))
        shuffle = "full" if shuffle is True else shuffle
        if shuffle == "stream" and self._prepared != "stream":
            raise BadSetting(
                f"{where}shuffle='stream' needs an exchange that delivers rows as they arrive, and this one waits for "
                f"all: prepare it with data={{{self.name!r}: tr.Data(df, shuffle='stream')}}, or take shuffle='full'"
            )
        window = -(-self._window // batch_size) * batch_size
        return EpochPlan(int(batch_size), shuffle, int(seed), remainder, self.size, window)


def _unknown(setting: str, value: Any, known: Sequence[Any]) -> str:
    hint = did_you_mean(str(value), map(str, known))
    return f"{setting}={value!r} is none of {', '.join(map(repr, known))}.{hint}"


def memory_limit(cgroups: Path = _CGROUP, group: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of the machine's memory, or fewer where a cgroup (1 or 2) limits this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in group.read_text().splitlines() if group.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _upwards(cgroups, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _upwards(cgroups / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def _upwards(root: Path, path: str, name: str) -> list[int]:
    """Return the limits of a group and of all groups around it; in a container the outer ones can't be seen."""
    inside = Path(path.lstrip("/"))
    files = [root / group / name for group in (inside, *inside.parents)]
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text != "max"]
