"""A page about the runs of a task, from their events: losses, ranks, what happened (the driver of a task)."""

from __future__ import annotations

import html
import threading
from collections import deque
from typing import Any

from tritium.events import (
    CheckpointLoaded,
    CheckpointSaved,
    Event,
    GangFailed,
    GangFormed,
    GangRetried,
    GangStalled,
    GangStarted,
    Logged,
    NonFatalError,
    Note,
    RowsReceived,
    RunEnded,
    RunOpened,
    Waiting,
)

_LINES = 200
"""Lines of what happened that are shown, the newest ones."""
_POINTS = 400
"""Points of a curve that are drawn."""
_WIDTH, _HEIGHT = 640, 200
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")


class Page:
    """The page, as HTML. Events may come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, _RunFacts] = {}
        self._fresh = False

    def add(self, event: Event) -> None:
        """Take an event: the callback of `tr.listen`."""
        with self._lock:
            self._runs.setdefault(event.run, _RunFacts()).add(event)
            self._fresh = True

    def taken(self) -> str | None:
        """Return the page where an event has come since the last call; else None."""
        with self._lock:
            if not self._fresh:
                return None
            self._fresh = False
            return "".join(facts.html(run) for run, facts in self._runs.items())


class _RunFacts:
    """What is shown of one run."""

    def __init__(self) -> None:
        self._settings = ""
        self._state = "starting"
        self._peers: dict[int, dict[str, Any]] = {}
        self._lines: deque[tuple[str, str, str]] = deque(maxlen=_LINES)
        self._curves: dict[str, dict[tuple[int, int], float]] = {}

    def add(self, event: Event) -> None:
        if isinstance(event, Logged):
            self._log(event)
        elif isinstance(event, RunOpened):
            self._settings = ", ".join(f"{name}={value!r}" for name, value in event.settings.items())
        elif isinstance(event, GangFormed):
            self._state = "running"
            self._peers = {peer["rank"]: dict(peer) for peer in event.peers}
        elif isinstance(event, RowsReceived):
            for name, counts in event.rows.items():
                for rank, rows in enumerate(counts):
                    self._peers.setdefault(rank, {"rank": rank})[f"rows of {name}"] = rows
        if (line := _line(event)) is not None:
            self._lines.append((event.time, event.kind, line))
        if isinstance(event, RunEnded):
            self._state = f"{'succeeded' if event.ok else 'failed'} after {event.seconds:.0f} s"

    def _log(self, event: Logged) -> None:
        peer = self._peers.setdefault(event.rank, {"rank": event.rank})
        peer.update({name: getattr(event, name) for name in ("epoch", "step") if getattr(event, name) is not None})
        if event.rank == 0:
            for name, value in (event.values or {}).items():
                if "loss" in name and not isinstance(value, str):
                    self._curves.setdefault(name, {})[event.epoch or 0, event.step or 0] = float(value)

    def html(self, run: str) -> str:
        columns = list(dict.fromkeys(name for _, peer in sorted(self._peers.items()) for name in peer))
        ranks = [[peer.get(name, "") for name in columns] for _, peer in sorted(self._peers.items())]
        return (
            f"<h2>Run {_text(run)}: {_text(self._state)}</h2><p>{_text(self._settings)}</p>{self._chart()}"
            f"<h3>Ranks</h3>{_table(columns, ranks)}<h3>Events</h3>"
            f"{_table(['time', 'kind', ''], list(reversed(self._lines)))}"
        )

    def _chart(self) -> str:
        if not self._curves:
            return ""
        values = [value for curve in self._curves.values() for value in curve.values()]
        low, high = min(values), max(values)
        parts = [f"<text x='4' y='12'>{high:.4g}</text><text x='4' y='{_HEIGHT - 4}'>{low:.4g}</text>"]
        for number, (name, curve) in enumerate(sorted(self._curves.items())):
            color = _COLORS[number % len(_COLORS)]
            ys = [curve[place] for place in sorted(curve)]
            ys = ys[:: max(1, len(ys) // _POINTS)]
            right, up = _WIDTH / max(1, len(ys) - 1), (_HEIGHT - 16) / ((high - low) or 1)
            points = " ".join(f"{right * i:.1f},{_HEIGHT - 8 - up * (y - low):.1f}" for i, y in enumerate(ys))
            parts.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='1.5'/>")
            parts.append(f"<text x='{_WIDTH - 160}' y='{16 * number + 12}' fill='{color}'>{_text(name)}</text>")
        style = "font: 11px sans-serif; max-width: 100%"
        return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' style='{style}'>{''.join(parts)}</svg>"


def _line(event: Event) -> str | None:
    """Return a line on what happened; None for an event that only counts."""
    if isinstance(event, (Note, Waiting, GangStalled)):
        return event.text
    if isinstance(event, GangStarted):
        return f"{event.ranks} ranks"
    if isinstance(event, GangFormed):
        return ", ".join(f"rank {peer['rank']} on {peer['host']}" for peer in event.peers)
    if isinstance(event, CheckpointSaved):
        return f"step {event.step}, {event.bytes:,} bytes in {event.seconds:.1f} s, {event.path}"
    if isinstance(event, CheckpointLoaded):
        return f"from step {event.step}, {event.path}"
    if isinstance(event, GangRetried):
        return f"retry {event.number} of {event.of}, from {event.start or 'the beginning'}: {event.reason}"
    if isinstance(event, GangFailed):
        where = f"rank {event.rank} on {event.host} (pid {event.pid})"
        return f"{where}: {event.signal or event.type or event.how} {event.text}\n{event.traceback}".rstrip()
    if isinstance(event, NonFatalError):
        return event.headline()
    if isinstance(event, RunEnded):
        return f"{'succeeded' if event.ok else 'failed'} after {event.seconds:.1f} s"
    return None


def _table(columns: list[str], rows: list[Any]) -> str:
    head = "".join(f"<th style='text-align: left'>{_text(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td style='white-space: pre-wrap; vertical-align: top'>{_text(v)}</td>" for v in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(value: Any) -> str:
    return html.escape(str(value))
