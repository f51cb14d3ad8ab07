"""The epochs of one call of `Shard.epochs`, and the position in them (rank)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tritium.data.batch import Decode, Gather
from tritium.data.epoch import Epoch, Stopwatch, Took
from tritium.data.fingerprint import compare, differences, summary
from tritium.data.idset import IdSet
from tritium.data.order import ORDER, Lookup
from tritium.data.policy import Known, Schedule, Streamed, step_count
from tritium.data.resize import State, resized
from tritium.data.route import Rest, Route, Shuffled, Straight, Windows
from tritium.data.spool import SpoolReader
from tritium.data.watermark import Feed
from tritium.errors import BadSetting, DataChanged, DataError


@dataclass(frozen=True)
class Plan:
    """What decides the order of the rows; two runs with the same plan and data take the same batches."""

    batch_size: int
    shuffle: str | bool
    seed: int
    remainder: str
    size: int
    window: int


class Rows(Protocol):
    """What an epoch asks of a shard; each of it may wait for the rows."""

    name: str
    index: int
    feed: Feed
    took: Took | None
    trace: Stopwatch | None

    @property
    def decode(self) -> Mapping[str, Decode]: ...
    @property
    def counts(self) -> list[int]: ...
    @property
    def reader(self) -> SpoolReader: ...
    @property
    def by_id(self) -> Lookup | None: ...
    @property
    def block(self) -> int: ...
    @property
    def packed_ids(self) -> list[str]: ...
    def keep(self, counts: dict[str, Any]) -> None: ...
    def tell(self, text: str) -> None: ...


class Passes:
    """The epochs of one call, and the position in them.

    A state is a position. Where an epoch was begun by a plain permutation, its step says which rows are seen; where
    it was streamed, or continued at another world size, the state lists them, and the rest is permuted anew.
    """

    def __init__(
        self,
        shard: Rows,
        n: int,
        plan: Plan,
        device: Any,
        resume: State | Sequence[State] | None,
        if_changed: str = "refuse",
    ) -> None:
        self._shard, self._n, self._plan, self._device = shard, n, plan, device
        self._if_changed = if_changed
        self._proved = False
        one = resume if isinstance(resume, Mapping) else resume[0] if resume else {}
        self._partitions = one.get("partitions")
        self._epoch: Epoch | None = None
        self._others: Sequence[State] = ()
        self._resume: State | None = None
        if isinstance(resume, Mapping):
            self._resume = self._own(resume)
        elif resume is not None:
            self._resume, self._others = self._from_all(resume)

    def __iter__(self) -> Iterator[Epoch]:
        first, step = self._start()
        for number in range(first, self._n):
            self._epoch = self._make(number, step if number == first else 0)
            yield self._epoch

    def state(self) -> dict[str, Any]:
        """JSON. Waits for the end of the shard: before it, none knows whether the ids will mean the same rows again."""
        self._shard.counts  # noqa: B018 - it waits
        (number, step), epoch, plan = self._start(), self._epoch, self._plan
        if epoch is not None:
            number, step = (epoch.number + 1, 0) if epoch.over else (epoch.number, epoch.taken)
        state: dict[str, Any] = {"epoch": number, "step": step, "index": self._shard.index, **asdict(plan)}
        state["order"] = ORDER
        if self._shard.feed.fingerprint is not None:
            state["fingerprint"] = summary(self._shard.feed.fingerprint)
            if self._shard.index == 0:
                state["partitions"] = self._shard.feed.fingerprint
        if step == 0:
            return state
        if self._listed(number):
            fresh = [] if epoch is None else [IdSet.of(ids).pack() for ids in epoch.seen(plan.batch_size)]
            state["seen"] = self._seen(number) + fresh
            if number in self._known:
                state["counts"] = self._known[number]
            return state
        state |= {"counts": self._shard.counts, "ids": self._shard.packed_ids}
        if plan.shuffle is not False:
            state["block"] = self._block
        return state

    # ---- where to begin

    def _start(self) -> tuple[int, int]:
        if not self._proved and (self._resume or self._others):
            self._proved = True
            self._prove(self._others[0] if self._others else self._resume or {})
        if self._others:
            shard, others = self._shard, self._others
            counts, self._others = shard.counts, ()
            shard.reader.extend(counts[shard.index])
            self._resume = resized(others, shard.name, shard.index, counts, shard.reader.ids, self._plan.batch_size)
        return (self._resume["epoch"], self._resume["step"]) if self._resume else (0, 0)

    def _prove(self, state: State) -> None:
        """A position must mean the row that it meant. The same on every rank, as state and fingerprint are."""
        other_rows = self._other_rows(state)
        if other_rows is None and ("seen" in state or state.get("order") == ORDER):
            return
        if state["step"]:
            why = other_rows or "another version of Tritium ordered its rows otherwise"
            hint = " Data(row_key=…) keeps the ids." if other_rows else ""
            self._shard.tell(
                f"shard {self._shard.name!r}: {why}, so epoch {state['epoch'] + 1} starts anew (after step "
                f"{state['step']}).{hint}"
            )
        self._others, self._resume = (), {"epoch": state["epoch"], "step": 0}

    def _other_rows(self, state: State) -> str | None:
        """What has become of the ids; None where they mean the same rows. DataChanged where others are refused."""
        shard, before = self._shard, state.get("fingerprint")
        if before is None or not shard.counts or shard.feed.fingerprint is None:  # the counts come last
            return None
        verdict = compare(before, summary(shard.feed.fingerprint))
        if verdict == "same":
            return None
        left = state["epoch"] < self._n  # else there is nothing that could begin anew: no row of now would be seen
        if verdict == "changed" and (self._if_changed == "refuse" or not left):
            rows = summary(shard.feed.fingerprint)["rows"]
            where = differences(self._partitions, shard.feed.fingerprint) if self._partitions else ""
            advice = (
                "Train on the same rows, start anew in another run_dir, or say that the epoch shall begin anew with "
                'the rows of now: if_changed="anew" (of an estimator: if_data_changed="anew").'
                if left
                else f"All epochs ({self._n}) had ended, so that none can begin anew with the rows of now: train on "
                "the same rows, or start anew in another run_dir."
            )
            raise DataChanged(
                f"{self._where()}the rows are not those of the checkpoint: {rows} rows, were {before['rows']}"
                f"{'; ' if where else ''}{where}. {advice}",
                shard=shard.name,
                rows=rows,
                before=before["rows"],
            )
        return "its rows have changed" if verdict == "changed" else "Spark gave the same rows other ids this time"

    @property
    def _known(self) -> dict[int, list[int]]:
        """Epoch → counts that stand in for those of the shards: what was seen at another world size, and the rest."""
        if self._resume and "seen" in self._resume and "counts" in self._resume:
            return {self._resume["epoch"]: self._resume["counts"]}
        return {}

    def _seen(self, number: int) -> list[str]:
        return list(self._resume.get("seen", ())) if self._resume and self._resume["epoch"] == number else []

    def _listed(self, number: int) -> bool:
        """Whether the rows that were seen in this epoch are listed."""
        return bool(self._seen(number)) or (self._plan.shuffle == "stream" and number == 0)

    @property
    def _block(self) -> int:
        """Rows permuted together: as when the epoch began, also where it continues with other memory."""
        return int(self._resume["block"]) if self._resume and "block" in self._resume else self._shard.block

    def _own(self, state: State) -> State:
        """A state of a gang of this size, checked."""
        where, now = self._where(), asdict(self._plan)
        missing = [key for key in ("epoch", "step", "index", *now) if key not in state]
        if missing:
            raise BadSetting(f"{where}the state lacks {', '.join(missing)}; give what Shard.state() returned")
        other = [f"{key}={now[key]!r} (was {state[key]!r})" for key in now if state[key] != now[key]]
        if other:
            more = ", or give the states of all ranks as a list" if state["size"] != now["size"] else ""
            raise BadSetting(f"{where}{', '.join(other)}. Continue with the settings of the state{more}, or start anew")
        if "seen" in state and state["index"] != self._shard.index:
            raise BadSetting(
                f"{where}this epoch continues from each rank's own state, and this is the one of rank "
                f"{state['index']}, given to rank {self._shard.index}"
            )
        return state

    def _from_all(self, states: Sequence[State]) -> tuple[State | None, Sequence[State]]:
        """The states of all ranks: this rank's own where the gang has its size again, else all of them, checked."""
        where, now = self._where(), asdict(self._plan)
        if [state.get("index") for state in states] != list(range(states[0].get("size", 0) if states else 1)):
            ranks = ", ".join(str(state.get("index")) for state in states) or "none"
            raise BadSetting(f"{where}it takes the states of all ranks, in rank order, and has those of: {ranks}")
        if all(states[0].get(key) == now[key] for key in ("size", "batch_size", "window")):
            return self._own(states[self._shard.index]), ()
        same = {key: states[0].get(key) for key in ("epoch", "step")}
        same |= {key: now[key] for key in ("shuffle", "seed", "remainder")}
        for state in states:
            for key, value in same.items():
                if state.get(key) != value:
                    raise BadSetting(
                        f"{where}{key}={value!r}, and in the state of rank {state['index']} {state.get(key)!r}"
                    )
        return None, states

    def _where(self) -> str:
        return f"shard {self._shard.name!r} can't resume: "

    # ---- an epoch

    def _streamed(self, number: int, step: int) -> bool:
        return self._plan.shuffle == "stream" and number == 0 and step == 0

    def _make(self, number: int, step: int) -> Epoch:
        shard, plan = self._shard, self._plan
        schedule: Schedule
        if self._streamed(number, step):
            schedule = Streamed(shard.name, shard.feed, shard.index, plan.batch_size, plan.remainder, plan.window)
        else:
            counts, rows = self._counts(number), shard.counts[shard.index]
            schedule = Known(shard.name, counts, shard.index, plan.batch_size, plan.remainder, rows)
        epoch = Epoch(
            number,
            schedule,
            self._route(number, step, schedule),
            Gather(shard.name, shard.reader, shard.decode, self._device),
            steps=lambda: step_count(self._counts(number), plan.batch_size, plan.remainder),
            ended=self._ended,
            took=shard.took,
            trace=shard.trace,
            taken=step,
        )
        return epoch

    def _route(self, number: int, step: int, schedule: Schedule) -> Route:
        shard, plan = self._shard, self._plan
        key = (plan.seed, number, shard.index)
        if self._streamed(number, step):
            return Windows(plan.window, lambda: schedule.own, key)
        rows = shard.counts[shard.index]
        shard.reader.extend(rows)
        if step == 0 or not self._listed(number):
            return Straight(shard.by_id) if plan.shuffle is False else Shuffled(rows, shard.by_id, self._block, key)
        taken, seen = step * plan.batch_size, [IdSet.unpack(text) for text in self._seen(number)]
        rest = Rest(shard.reader.ids, shard.by_id, seen, taken, key if plan.shuffle is not False else None)
        left = max(0, self._counts(number)[shard.index] - taken)
        if len(rest.rows) != left:
            raise DataError(
                f"shard {shard.name!r} of rank {shard.index} can't resume: of its {rows} rows {len(rest.rows)} are not "
                f"among those seen, and {left} should be. The DataFrame has been computed again with other row ids; "
                "start the epoch anew, or give Data(row_key=…)."
            )
        return rest

    def _counts(self, number: int) -> list[int]:
        counts = self._shard.counts
        if number in self._known:
            return self._known[number]
        then = self._resume.get("counts", counts) if self._resume else counts
        if then != counts and not self._known:
            raise DataError(
                f"{self._where()}it has {counts} rows per rank, and had {then} when the state was taken. Start the "
                "epoch anew, or give the same DataFrame."
            )
        return counts

    def _ended(self, epoch: Epoch) -> None:
        """Keep and pass on what the epoch has done with the rows."""
        size, steps, remainder = self._plan.batch_size, epoch.steps, self._plan.remainder
        count, taken, before = self._counts(epoch.number)[self._shard.index], steps * size, epoch.first * size
        self._shard.keep(
            {
                "shard": self._shard.name,
                "epoch": epoch.number,
                "steps": steps,
                "rows": self._shard.counts[self._shard.index],
                "used": max(0, min(taken, count) - before),
                "padded": max(0, steps - max(-(-count // size), epoch.first)) if remainder == "pad" else 0,
                "dropped": max(0, count - taken),
                "repeated": max(0, taken - max(count, before)) if remainder == "repeat" else 0,
                "shuffle_score": self._score(epoch.number),
            }
        )

    def _score(self, number: int) -> float:
        """The share of the rows among which the place of a row in an epoch is drawn."""
        if self._plan.shuffle is False:
            return 0.0
        drawn = self._plan.window if self._streamed(number, 0) else self._block
        return min(1.0, drawn / self._shard.counts[self._shard.index])
