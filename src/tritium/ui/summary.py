"""The state of a run as its page shows it, folded from its events (driver)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tritium.events import (
    Disconnected,
    EpochCounted,
    Event,
    GangFailed,
    GangFormed,
    GangRetried,
    GangStalled,
    GangStarted,
    Logged,
    MicroBatchScored,
    ModelDescribed,
    RankEnded,
    RankReported,
    Reconnected,
    RowsCounted,
    RowsReceived,
    RunEnded,
    RunOpened,
    StepsTraced,
    Waiting,
)
from tritium.observe.entries import ended, formed
from tritium.observe.position import TrainingPosition
from tritium.observe.verdict import verdict
from tritium.ui.entries import Entries
from tritium.ui.scored import ScoredBatches
from tritium.ui.series import Curves, Rates
from tritium.ui.told import Teller, Told


class Summary:
    """The state of one run. `event` takes its events in their order; `sections` returns what the page shows.

    Not thread-safe.
    """

    def __init__(self, run_dir: str, told: Teller) -> None:
        self.run_dir, self._told = run_dir, told
        self.run = self.started = ""
        self.ended: RunEnded | None = None
        self.failure: Told | None = None
        self._now = 0.0
        self._opened: RunOpened | None = None
        self._phase = ""
        self._retry: GangRetried | None = None
        self._stall: GangStalled | None = None
        self._curves, self._rates = Curves(), Rates()
        self._position = TrainingPosition(lambda: self._now)
        self._ranks: dict[int, dict[str, Any]] = {}
        self._rows: dict[str, dict[int, dict[str, Any]]] = {}
        self._traces: dict[int, dict[str, Any]] = {}
        self._entries = Entries(run_dir, told)
        self._scored = ScoredBatches()
        self._model: list[dict[str, Any]] = []
        self._ranges: dict[str, Any] = {}

    def event(self, event: Event) -> None:
        """Take one event; kinds that the page does not show are ignored."""
        self._now = datetime.fromisoformat(event.time).timestamp() if event.time else self._now
        self._entries.event(event)
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event)

    def sections(self) -> dict[str, Any]:
        """Return the parts of the page by name, as JSON."""
        metrics = {f"metric {name}": series.to_json() for name, series in self._curves.steps.items()}
        epochs = {f"epochs {name}": series.to_json() for name, series in self._curves.epochs.items()}
        rates = {f"rate {rank}": series.to_json() for rank, series in sorted(self._rates.series.items())}
        scored = {f"scored {name}": series.to_json() for name, series in self._scored.series.items()}
        return {
            "head": self._head(),
            "scored": self._scored.to_json(),
            "model": self._model,
            "ranges": self._ranges,
            "ranks": [self._ranks[rank] for rank in sorted(self._ranks)],
            "events": self._entries.to_json(),
            "data": {name: [by_rank[rank] for rank in sorted(by_rank)] for name, by_rank in self._rows.items()},
            "settings": dict(self._opened.settings) if self._opened else {},
            "versions": dict(self._opened.versions) if self._opened else {},
            **metrics,
            **epochs,
            **rates,
            **scored,
        }

    def _head(self) -> dict[str, Any]:
        failed = self.failure if self.ended is None or not self.ended.ok else None
        return {
            "run": self.run,
            "started": self.started,
            "phase": self._phase,
            "position": self._position.text(),
            "fraction": self._position.fraction,
            "failure": failed and failed.what,
            "next": failed and failed.next,
            "whole": failed and failed.whole,
            "retry": self._retry and f"Retry {self._retry.number} of {self._retry.of} after this: {self._retry.reason}",
            "stall": self._stall and self._stall.text,
            "verdict": verdict(self._traces) if self._traces else None,
            "seconds": self.ended and self.ended.seconds,
        }

    def _rank(self, rank: int) -> dict[str, Any]:
        return self._ranks.setdefault(rank, {"rank": rank, "state": "starting"})

    # ---- The run and its attempts

    def _on_run(self, event: RunOpened) -> None:
        self._opened, self.run, self.started = event, event.run, event.time
        self.ended = self.failure = self._retry = self._stall = None
        self._forget_attempt()
        self._ranks.clear()
        self._phase = "starting"

    def _forget_attempt(self) -> None:
        self._rows.clear()
        self._traces.clear()
        self._rates.forget_attempt()
        self._position = TrainingPosition(lambda: self._now)

    def _on_started(self, event: GangStarted) -> None:
        self._forget_attempt()
        self._phase = f"starting {event.ranks} ranks"

    def _on_waiting(self, event: Waiting) -> None:
        self._phase = event.text

    def _on_reported(self, event: RankReported) -> None:
        self._phase = "ranks are starting"

    def _on_formed(self, event: GangFormed) -> None:
        self._ranks = {int(peer["rank"]): {**peer, "state": "running"} for peer in event.peers}
        if self._retry is not None:
            self.failure = None
        self._phase = formed(event)

    def _on_rank_ended(self, event: RankEnded) -> None:
        self._rank(event.rank)["state"] = "done"

    def _on_retry(self, event: GangRetried) -> None:
        self._retry = event
        self._forget_attempt()

    def _on_ended(self, event: RunEnded) -> None:
        self.ended = event
        self._phase = ended(event)

    # ---- Faults

    def _on_failed(self, event: GangFailed) -> None:
        self.failure = self._told(event.fields(), self.run_dir)
        if event.rank >= 0:
            how = f"killed by {event.signal}" if event.signal else event.how
            self._rank(event.rank).update(state=how, host=event.host)
        for rank in self._ranks.values():
            if rank["state"] == "running":
                rank["state"] = "ended with it"

    def _on_stalled(self, event: GangStalled) -> None:
        self._stall = event
        if event.rank is not None:
            self._rank(event.rank)["state"] = "hangs"

    def _on_connection(self, event: Disconnected | Reconnected) -> None:
        self._rank(event.rank)["state"] = "disconnected" if isinstance(event, Disconnected) else "running"

    _on_disconnected = _on_reconnected = _on_connection

    # ---- Progress

    def _on_log(self, event: Logged) -> None:
        self._stall = None if self._stall is not None and self._stall.rank == event.rank else self._stall
        self._position.log(event)
        self._curves.log(event)
        self._rates.log(event, self._now)
        rank = self._rank(event.rank)
        rank["state"] = "running" if rank["state"] == "hangs" else rank["state"]
        rank.update({name: value for name in ("step", "epoch", "rows") if (value := getattr(event, name)) is not None})
        if event.rank in self._rates.series:
            rank["rate"] = self._rates.series[event.rank].y[-1]
        rank.setdefault("values", {}).update(event.values or {})

    def _on_trace(self, event: StepsTraced) -> None:
        trace = {"seconds": dict(event.seconds), "steps": event.steps, "arrive": event.arrive}
        self._traces[event.rank] = trace
        self._rank(event.rank)["shares"] = _shares(event.seconds)

    def _on_model(self, event: ModelDescribed) -> None:
        self._model = [{"kind": "input", **facts} for facts in event.inputs]
        self._model += [{"kind": "output", **facts} for facts in event.outputs]
        self._ranges = dict(event.ranges or {})

    def _on_micro_batch(self, event: MicroBatchScored) -> None:
        self._scored.add(event, self._now)
        self._phase = self._scored.text()

    # ---- Rows

    def _shard(self, name: str, rank: int) -> dict[str, Any]:
        return self._rows.setdefault(name, {}).setdefault(rank, {"rank": rank})

    def _on_rows(self, event: RowsCounted) -> None:
        self._shard(event.name, event.rank)["rows"] = event.rows

    def _on_received(self, event: RowsReceived) -> None:
        for key, by_name in (("rows", event.rows), ("skipped", event.skipped or {})):
            for name, counts in by_name.items():
                for rank, count in enumerate(counts):
                    self._shard(name, rank)[key] = int(count)

    def _on_counts(self, event: EpochCounted) -> None:
        counts: dict[str, float] = {
            name: getattr(event, name) for name in ("steps", "used", "padded", "dropped", "repeated")
        }
        if event.shuffle_score is not None:
            counts["shuffle score"] = event.shuffle_score
        self._shard(event.name, event.rank).update(counts)


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the time in which a rank waits for data, computes, and exchanges."""
    whole = sum(seconds.values()) or 1.0
    parts = {"data": ("wait for data", "copy to device"), "exchange": ("communicate",)}
    shares = {name: sum(seconds.get(part, 0.0) for part in names) / whole for name, names in parts.items()}
    return {**shares, "compute": 1.0 - sum(shares.values())}
