"""The rows of a named DataFrame that one rank trains on, as epochs of batches (rank)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tritium.data.batch import Decode, Gather, checked_device
from tritium.data.epoch import Epoch, Note
from tritium.data.memory import memory_limit
from tritium.data.order import Lookup, by_id, pack_ids
from tritium.data.policy import REMAINDERS, Known, Schedule, Streamed, step_count
from tritium.data.route import Rest, Route, Shuffled, Straight, Windows
from tritium.data.schema import Field
from tritium.data.spool import Spool, SpoolReader
from tritium.data.watermark import Feed, Mark
from tritium.errors import BadSetting, DataError

Description = Sequence[Mapping[str, Any]]
SHUFFLES = ("full", "stream", True, False)


@dataclass(frozen=True)
class Plan:
    """What decides the order of the rows; two runs with the same plan and data take the same batches."""

    batch_size: int
    shuffle: str | bool
    seed: int
    remainder: str
    size: int
    window: int


class Shard:
    """One index's rows of the DataFrame `name`.

    description : `Spool.describe()`, or a function that waits for it, or an open SpoolReader.
    index, size : which of how many shards; the rank and world size, unless several ranks share a shard.
    feed        : where the counts of all indices come from.
    decode      : bytes column → function from its content to an array.
    prepared    : what the exchange prepared: "full" or False (sorted by id) or "stream" (as it arrives).
    note        : called at the end of every epoch with its counts (rows used, padded, dropped, repeated).
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
        prepared: Literal["full", "stream"] | bool = "full",
        note: Note | None = None,
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
        self._prepared = prepared
        self._note = note
        self._window = window
        self._memory = memory
        self._history: list[dict[str, Any]] = []
        self._run: _Run | None = None

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
        device: Any = None,
        resume: Mapping[str, Any] | None = None,
    ) -> Iterator[Epoch]:
        """`n` epochs of batches of `batch_size` rows, with the same number of steps on every rank.

        shuffle   : "full" (a seeded permutation of all rows), "stream" (the first epoch in the order of arrival,
                    permuted within windows, while rows still arrive; then as "full"), False (by id). None: as prepared.
        remainder : "pad" (the last batches may be short, or one row of scale 0), "drop", "repeat".
        device    : None for NumPy arrays, else torch tensors there.
        resume    : what `state()` gave on this rank: continues with exactly the rows not yet seen.

        Raises BadSetting at once; EmptyShard at the first epoch, the same on every rank.
        """
        plan = self._plan(n, batch_size, shuffle, seed, remainder)
        self._run = _Run(self, int(n), plan, checked_device(device), resume)
        return iter(self._run)

    def state(self) -> dict[str, Any]:
        """The position of the latest `epochs()`, as JSON; the batch in hand counts as taken."""
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
                f"{where}shuffle='stream' needs an exchange that delivers rows as they arrive, and this one sorts "
                f"them: prepare it with data={{{self.name!r}: tr.Data(df, shuffle='stream')}}, or take shuffle='full'"
            )
        window = -(-self._window // batch_size) * batch_size
        return Plan(int(batch_size), shuffle, int(seed), remainder, self.size, window)


class _Run:
    """The epochs of one call of `Shard.epochs`, and the position in them."""

    def __init__(self, shard: Shard, n: int, plan: Plan, device: Any, resume: Mapping[str, Any] | None) -> None:
        self._shard, self._n, self._plan, self._device = shard, n, plan, device
        self._resume = None if resume is None else self._checked(resume)
        self._seen: list[str] = list(self._resume.get("seen", ())) if self._resume else []
        self._start = (self._resume["epoch"], self._resume["step"]) if self._resume else (0, 0)
        self._epoch: Epoch | None = None

    def __iter__(self) -> Iterator[Epoch]:
        first, step = self._start
        for number in range(first, self._n):
            self._epoch = self._make(number, step if number == first else 0)
            if not self._epoch.over:
                yield self._epoch

    def state(self) -> dict[str, Any]:
        """JSON: epoch, step, the plan; counts and block where they are known; the ids seen in a streamed epoch."""
        (number, step), epoch = self._start, self._epoch
        if epoch is not None:
            number, step = (epoch.number + 1, 0) if epoch.over else (epoch.number, epoch.taken)
        state = {"epoch": number, "step": step, **asdict(self._plan)}
        if step and (self._plan.shuffle == "full" or (self._plan.shuffle == "stream" and number)):
            state["block"] = self._block
        if epoch is not None and not self._streamed(number, 0):
            state["counts"] = self._shard.counts
        if step and self._plan.shuffle == "stream" and number == 0:
            fresh = [] if epoch is None else [pack_ids(ids) for ids in epoch.seen(self._plan.batch_size)]
            state |= {"index": self._shard.index, "seen": self._seen + fresh}
        return state

    @property
    def _block(self) -> int:
        """Rows permuted together: as when the epoch began, also where it continues with other memory."""
        return int(self._resume["block"]) if self._resume and "block" in self._resume else self._shard.block

    def _score(self, number: int) -> float:
        """The share of the rows among which the place of a row in an epoch is drawn."""
        if self._plan.shuffle is False:
            return 0.0
        streamed = self._streamed(number, 0)
        drawn = self._plan.window if streamed else self._block
        return min(1.0, drawn / self._shard.rows)

    def _streamed(self, number: int, step: int) -> bool:
        return self._plan.shuffle == "stream" and number == 0 and step == 0

    def _make(self, number: int, step: int) -> Epoch:
        shard, plan = self._shard, self._plan
        schedule: Schedule
        if self._streamed(number, step):
            schedule = Streamed(shard.name, shard.feed, shard.index, plan.batch_size, plan.remainder, plan.window)
        else:
            schedule = Known(shard.name, self._counts(), shard.index, plan.batch_size, plan.remainder)
        epoch = Epoch(
            number,
            schedule,
            self._route(number, step, schedule),
            Gather(shard.name, shard.reader, shard.decode, self._device),
            steps=lambda: step_count(shard.counts, plan.batch_size, plan.remainder),
            ended=self._ended,
            taken=step,
        )
        epoch.over = step > 0 and step >= epoch.steps
        return epoch

    def _route(self, number: int, step: int, schedule: Schedule) -> Route:
        shard, plan = self._shard, self._plan
        key = (plan.seed, number, shard.index)
        if plan.shuffle is False:
            return Straight(shard.by_id)
        if self._streamed(number, step):
            return Windows(plan.window, lambda: schedule.own, key)
        if plan.shuffle == "full" or number:
            return Shuffled(shard.rows, shard.by_id, self._block, key)
        by_id, taken = shard.by_id, step * plan.batch_size
        rest = Rest(shard.reader.ids, by_id, self._seen, taken, key)
        if len(rest.rows) != max(0, shard.rows - taken):
            raise DataError(
                f"shard {shard.name!r} of rank {shard.index} can't resume: of its {shard.rows} rows {len(rest.rows)} "
                f"are not among those seen, and {max(0, shard.rows - taken)} should be. The DataFrame has been "
                "computed again with other row ids; start the epoch anew, or persist the exchange."
            )
        return rest

    def _counts(self) -> list[int]:
        counts = self._shard.counts
        then = self._resume.get("counts", counts) if self._resume else counts
        if then != counts:
            raise DataError(
                f"shard {self._shard.name!r} can't resume: it has {counts} rows per rank, and had {then} when the "
                "state was taken. Start the epoch anew, or give the same DataFrame."
            )
        return counts

    def _checked(self, resume: Mapping[str, Any]) -> Mapping[str, Any]:
        where = f"shard {self._shard.name!r} can't resume: "
        now = asdict(self._plan)
        missing = [key for key in ("epoch", "step", *now) if key not in resume]
        if missing:
            raise BadSetting(f"{where}the state lacks {', '.join(missing)}; give what Shard.state() returned")
        if "seen" in resume and resume["index"] != self._shard.index:
            raise BadSetting(
                f"{where}a streamed epoch continues from each rank's own state, and this is the one of rank "
                f"{resume['index']}, given to rank {self._shard.index}"
            )
        other = [f"{key}={now[key]!r} (was {resume[key]!r})" for key in now if resume[key] != now[key]]
        if other:
            raise BadSetting(f"{where}{', '.join(other)}. Continue with the settings of the state, or start anew")
        return resume

    def _ended(self, epoch: Epoch) -> None:
        """Keep and pass on what the epoch has done with the rows."""
        count, size, steps, remainder = self._shard.rows, self._plan.batch_size, epoch.steps, self._plan.remainder
        taken, before = steps * size, epoch.first * size
        self._shard.keep(
            {
                "shard": self._shard.name,
                "epoch": epoch.number,
                "steps": steps,
                "rows": count,
                "used": max(0, min(taken, count) - before),
                "padded": max(0, steps - max(-(-count // size), epoch.first)) if remainder == "pad" else 0,
                "dropped": max(0, count - taken),
                "repeated": max(0, taken - max(count, before)) if remainder == "repeat" else 0,
                "shuffle_score": self._score(epoch.number),
            }
        )


def _unknown(setting: str, value: Any, known: Sequence[Any]) -> str:
    close = difflib.get_close_matches(str(value), [str(one) for one in known], 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{setting}={value!r} is none of {', '.join(map(repr, known))}.{hint}"
