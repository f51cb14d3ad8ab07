"""The report of a run, report.json, made from its events (driver)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from tritium.events import (
    CheckpointSaved,
    EpochCounted,
    Event,
    FileStored,
    GangFailed,
    GangFormed,
    GangRetried,
    GangStarted,
    Logged,
    ModelDescribed,
    Note,
    RowsCounted,
    RowsReceived,
    RunEnded,
    StepsTraced,
)
from tritium.observe.run_directory import command, versions, without_secrets
from tritium.observe.verdict import verdict

_COUNTS = ("used", "padded", "dropped", "repeated")


class Report:
    """The collected events of a run; `build()` returns the report so far. Methods may be called from any thread."""

    def __init__(self, run_id: str, run_dir: str, settings: Mapping[str, Any]) -> None:
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._since: dict[str, float] = {}
        self._ranks: dict[int, dict[str, Any]] = {}
        self._ended: set[tuple[str, int]] = set()
        self._traces: dict[int, dict[str, Any]] = {}
        self._report: dict[str, Any] = {
            "run": run_id,
            "run_dir": run_dir,
            "ok": False,
            "started": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "seconds": None,
            "command": command(),
            "settings": without_secrets(settings),
            "versions": versions(),
            "fingerprint": {},
            "stored": [],
            "checkpoint": None,
            "model": None,
            "notes": [],
            "retries": [],
            "failure": None,
            "error": None,
        }

    def event(self, event: Event) -> None:
        """Record one event of the run; kinds that the report does not use are ignored."""
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            with self._lock:
                handler(event)

    def build(self) -> dict[str, Any]:
        """Return the report so far, as JSON.

        seconds_until : from the start of the run until the last attempt's gang was formed, its rows were spooled, and
                        its first numbers were logged.
        ranks         : host and pid of each, its rows by name (read, and in all epochs together used, padded, dropped
                        and repeated; "skipped" where rows were left out), and the numbers it logged last; with
                        trace=True its `Trace.report()`.
        fingerprint   : by source partition the rows and the sum of their hashes, in hexadecimal.
        checkpoint    : the newest that was saved.
        model         : the inputs and outputs of the model that an estimator has trained; None without one.
        error         : the text of the error that the caller got; None after a success.
        verdict       : with trace=True, a sentence on the part that the steps wait for.
        """
        with self._lock:
            return {
                **self._report,
                "verdict": verdict(self._traces) if self._traces else None,
                "seconds_until": dict(self._since),
                "ranks": [{"rank": rank, **facts} for rank, facts in sorted(self._ranks.items())],
            }

    # ---- Events, under the lock

    def _on_started(self, event: GangStarted) -> None:
        self._forget_attempt()  # Also of one that was ended to grow, which is no retry.

    def _forget_attempt(self) -> None:
        """Forget times, rows and numbers of the attempt before. Hosts stay until the next gang has formed."""
        self._traces.clear()
        for facts in self._ranks.values():
            for name in ("shards", "logged", "trace"):
                facts.pop(name, None)
        self._ended.clear()
        self._since.clear()

    def _on_formed(self, event: GangFormed) -> None:
        self._reached("formed")
        for rank in [rank for rank in self._ranks if rank >= len(event.peers)]:  # An attempt before had more.
            del self._ranks[rank]
        for peer in event.peers:
            self._rank(peer["rank"]).update({key: value for key, value in peer.items() if key != "rank"})

    def _on_rows(self, event: RowsCounted) -> None:
        self._shard(event.rank, event.name)["rows"] = event.rows
        if event.ended:
            self._ended.add((event.name, event.rank))
            names = {name for facts in self._ranks.values() for name in facts.get("shards", ())}
            if all((name, rank) in self._ended for name in names for rank in self._ranks):
                self._since["spooled"] = self._elapsed()

    def _on_received(self, event: RowsReceived) -> None:
        for key, by_name in (("skipped", event.skipped or {}), ("rows", event.rows)):
            for name, counts in by_name.items():
                for rank, count in enumerate(counts):
                    self._shard(rank, name)[key] = int(count)
        self._report["fingerprint"] = {
            name: {str(partition): [count, digest] for partition, count, digest, *_ in parts}
            for name, parts in event.fingerprint.items()
        }

    def _on_log(self, event: Logged) -> None:
        self._reached("first_log")
        position = {name: value for name, value in event.fields().items() if name not in ("rank", "values")}
        self._rank(event.rank).setdefault("logged", {}).update({**position, **(event.values or {})})

    def _on_counts(self, event: EpochCounted) -> None:
        shard = self._shard(event.rank, event.name)
        for key in _COUNTS:
            shard[key] = shard.get(key, 0) + getattr(event, key)
        if event.shuffle_score is not None:
            shard["shuffle_score"] = min(event.shuffle_score, shard.get("shuffle_score", 1.0))

    def _on_stored(self, event: FileStored) -> None:
        if event.name not in self._report["stored"]:
            self._report["stored"].append(event.name)

    def _on_checkpoint(self, event: CheckpointSaved) -> None:
        self._report["checkpoint"] = {key: value for key, value in event.fields().items() if key != "rank"}

    def _on_trace(self, event: StepsTraced) -> None:
        trace = {key: value for key, value in event.fields().items() if key != "rank"}
        self._traces[event.rank] = trace
        self._rank(event.rank)["trace"] = trace

    def _on_model(self, event: ModelDescribed) -> None:
        self._report["model"] = event.fields()

    def _on_note(self, event: Note) -> None:
        self._report["notes"].append(event.text)

    def _on_retry(self, event: GangRetried) -> None:
        self._report["retries"].append({**event.fields(), "failure": self._report["failure"]})
        self._report["failure"] = None
        self._forget_attempt()

    def failed_by(self, error: str, **failure: Any) -> None:
        """Record the text of the error that ended the run.

        failure : the facts of one that is no rank's (of the source, the session, a disk): its `rank` is None.
        """
        with self._lock:
            self._report["error"] = error
            self._report["failure"] = self._report["failure"] or failure

    def _on_failed(self, event: GangFailed) -> None:
        self._report["failure"] = self._report["failure"] or event.fields()

    def _on_ended(self, event: RunEnded) -> None:
        self._report["ok"] = event.ok
        self._report["seconds"] = event.seconds

    def _rank(self, rank: int) -> dict[str, Any]:
        return self._ranks.setdefault(rank, {})

    def _shard(self, rank: int, name: str) -> dict[str, Any]:
        shard: dict[str, Any] = self._rank(rank).setdefault("shards", {}).setdefault(name, {})
        return shard

    def _reached(self, what: str) -> None:
        self._since.setdefault(what, self._elapsed())

    def _elapsed(self) -> float:
        return round(time.monotonic() - self._begun, 3)
