"""The rows of a named DataFrame that one rank trains on, as epochs of batches (rank)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from tritium.data.batch import Decode, checked_device
from tritium.data.epoch import Epoch, Note, Stopwatch, Took
from tritium.data.idset import IdSet
from tritium.data.memory import memory_limit
from tritium.data.order import Lookup, by_id
from tritium.data.passes import Passes, Plan
from tritium.data.policy import REMAINDERS
from tritium.data.schema import Field
from tritium.data.spool import Spool, SpoolReader
from tritium.data.watermark import Feed, Mark
from tritium.errors import BadSetting
from tritium.hints import did_you_mean

Description = Sequence[Mapping[str, Any]]
SHUFFLES = ("full", "stream", True, False)
_SPAN = 1 << 20


class Shard:
    """One index's rows of the DataFrame `name`.

    description : `Spool.describe()`, or a function that waits for it, or an open SpoolReader.
    index, size : which of how many shards; the rank and world size, unless several ranks share a shard.
    feed        : where the counts of all indices come from.
    decode      : bytes column → function from its content to an array.
    prepared    : what the exchange prepared: "full" or False (once all are there) or "stream" (as they arrive).
    note        : called at the end of every epoch with its counts (rows used, padded, dropped, repeated).
    took        : called with every batch: its epoch and step, both from 0.
    say         : called with a sentence for the person who waits.
    trace       : is told what the time goes into.
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
        note: Note | None = None,
        took: Took | None = None,
        say: Callable[[str], None] | None = None,
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
        self.decode = dict(decode or {})
        self._tensors = tensors
        self._prepared = prepared
        self._note = note
        self.took = took
        self._say = say
        self.trace = trace
        self._window = window
        self._memory = memory
        self._history: list[dict[str, Any]] = []
        self._run: Passes | None = None

    @classmethod
    def of(cls, name: str, spool: Spool, fields: Sequence[Field], **settings: Any) -> Shard:
        """The only shard (index 0 of 1), over a spool whose rows are all committed."""
        feed = Feed()
        feed.publish(Mark(spool.rows, {0: spool.rows}, 1))
        return cls(name, spool.describe(), fields, index=0, size=1, feed=feed, **settings)

    @property
    def counts(self) -> list[int]:
        """Rows of every index. Waits until all are complete."""
        return self.feed.counts()

    @property
    def rows(self) -> int:
        """Rows of this shard. Waits until all are complete."""
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
        if_changed: Literal["refuse", "anew"] = "refuse",
    ) -> Iterator[Epoch]:
        """`n` epochs of batches of `batch_size` rows, with the same number of steps on every rank.

        shuffle   : "full" (a seeded permutation of all rows), "stream" (the first epoch in the order of arrival,
                    permuted within windows, while rows still arrive; then as "full"), False (by id). None: as prepared.
        remainder : "pad" (the last batches may be short, or one row of scale 0), "drop", "repeat".
        device    : where the torch tensors of a batch are; None for NumPy arrays. "auto": tensors in host memory where
                    the function uses torch (or framework="torch"), else NumPy arrays.
        resume    : what `state()` gave on this rank: continues with exactly the rows not yet seen. A list of the
                    states of all ranks, in rank order, also continues at another world size. Where Spark has given
                    the same rows other ids since, the epoch starts anew, and says so.
        if_changed: what to do when the rows are others than those of the state: "refuse", or begin its epoch "anew".
                    After the last epoch there is none to begin: they are refused.

        Raises BadSetting at once; at the first epoch, the same on every rank, EmptyShard and DataChanged.
        """
        if if_changed not in ("refuse", "anew"):
            raise BadSetting(f"shard {self.name!r}: " + _unknown("if_changed", if_changed, ("refuse", "anew")))
        plan = self._plan(n, batch_size, shuffle, seed, remainder)
        if isinstance(device, str) and device == "auto":
            place = "auto" if self._tensors and find_spec("torch") is not None else None
        else:
            place = checked_device(device)
        self._run = Passes(self, int(n), plan, place, resume, if_changed)
        return iter(self._run)

    def alone(self) -> Shard:
        """This shard's rows as the only shard there is: its steps are its own. To be closed with this one."""
        feed = Feed()
        feed.publish(Mark(self.rows, {0: self.rows}, 1))
        same: dict[str, Any] = {"decode": self.decode, "took": self.took, "trace": self.trace, "memory": self._memory}
        same |= {"note": self._note, "say": self._say, "tensors": self._tensors}
        same |= {"prepared": self._prepared, "window": self._window}
        return Shard(self.name, self.reader, self.schema, index=0, size=1, feed=feed, **same)

    def state(self) -> dict[str, Any]:
        """The position of the latest `epochs()`, as JSON; the batch in hand counts as taken.

        Waits until the shards of all ranks are complete.
        """
        if self._run is None:
            raise BadSetting(f"shard {self.name!r} has no position before epochs() is called")
        return self._run.state()

    def report(self) -> list[dict[str, Any]]:
        """For each epoch that was taken to its end: the rows used, padded, dropped and repeated."""
        return list(self._history)

    def close(self) -> None:
        """Let go of the maps."""
        if "reader" in self.__dict__:
            self.reader.close()

    @cached_property
    def reader(self) -> SpoolReader:
        """The maps. Waits until the first row has shown what the columns look like."""
        given = self._description
        if isinstance(given, SpoolReader):
            return given
        return SpoolReader(given() if callable(given) else given, 0)

    @cached_property
    def by_id(self) -> Lookup | None:
        """Position among the rows sorted by id → row in the spool; None where both are the same. Waits for the end."""
        self.reader.extend(self.rows)
        return by_id(self.reader.ids)

    @cached_property
    def packed_ids(self) -> list[str]:
        """All ids, in pieces, as text. Waits for the end."""
        self.reader.extend(self.rows)
        ids = self.reader.ids
        return [IdSet.of(ids[start : start + _SPAN]).pack() for start in range(0, len(ids), _SPAN)]

    @cached_property
    def block(self) -> int:
        """Rows that are permuted together: as many as memory holds. Waits for the end."""
        self.reader.extend(self.rows)
        memory = memory_limit() // 2 if self._memory is None else self._memory
        return max(1, memory // max(1, self.reader.row_bytes))

    def keep(self, counts: dict[str, Any]) -> None:
        """Keep what an epoch has done with the rows, and pass it on."""
        self._history.append(counts)
        if self._note is not None:
            self._note(counts)

    def tell(self, text: str) -> None:
        """Say it to the person who waits: once for all ranks."""
        if self._say is not None and self.index == 0:
            self._say(text)

    def _plan(self, n: Any, batch_size: Any, shuffle: Any, seed: Any, remainder: Any) -> Plan:
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
        return Plan(int(batch_size), shuffle, int(seed), remainder, self.size, window)


def _unknown(setting: str, value: Any, known: Sequence[Any]) -> str:
    hint = did_you_mean(str(value), map(str, known))
    return f"{setting}={value!r} is none of {', '.join(map(repr, known))}.{hint}"
