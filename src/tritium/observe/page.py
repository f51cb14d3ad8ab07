"""A page about one run, report.html: what happened, curves, ranks, where the time went (driver).

The page is one file of HTML and SVG, without scripts, and loads nothing. Everything that a rank has written is escaped.
"""

from __future__ import annotations

import html
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tritium.events import Event, Logged
from tritium.observe.entries import entry_of

_LINES = 200
"""The lines on what happened that are shown, the newest ones."""
_POINTS = 400
"""The most points of a curve that are kept: beyond twice as many, every other one is dropped."""
_CHARTS = 8
"""The most charts: one of all losses, and one of each further number."""
_WIDTH, _HEIGHT, _MARGIN = 640, 180, 16
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
_STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { text-align: left; vertical-align: top; padding: .1rem .8rem .1rem 0; white-space: pre-wrap }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: .2rem solid #d62728; padding-left: .6rem }
svg { font: 11px system-ui, sans-serif; max-width: 100%; height: auto; fill: currentColor }
"""


class RunPage:
    """What the page shows beside the report: curves of what rank 0 logged, and lines on what happened.

    Takes bounded memory, however long the run is. Methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[tuple[str, str, str]] = deque(maxlen=_LINES)
        self._curves: dict[str, list[tuple[float, float]]] = {}

    def add(self, event: Event) -> None:
        """Take the next event of the run."""
        with self._lock:
            if isinstance(event, Logged) and event.rank == 0:
                self._log(event)
            if (entry := entry_of(event)) is not None:
                self._lines.append((event.time[11:19], event.kind, entry.whole))

    def body(self, report: Mapping[str, Any]) -> str:
        """Return the page's HTML without the frame around it.

        report : the content of report.json, whole or so far.
        """
        with self._lock:
            charts, lines = "".join(self.charts("step")), list(reversed(self._lines))
        parts = (
            _heading(report),
            charts,
            _ranks(report["ranks"]),
            _times(report),
            _model(report.get("model")),
            section("Retries", table(("number", "from step", "reason"), _retries(report["retries"]))),
            section("Events, the newest first", table(("time, UTC", "kind", "what"), lines)),
            section("Settings and versions", _settings(report)),
        )
        return "".join(parts)

    def live(self, report: Mapping[str, Any]) -> str:
        """Return the curves of the losses and the row of each rank as HTML, for a display that goes on."""
        with self._lock:
            charts = list(itertools.islice(self.charts("step"), 1))
        return "".join(charts) + _ranks(report["ranks"])

    def document(self, report: Mapping[str, Any]) -> str:
        """Return the page as a whole file of HTML; see `body`."""
        head = (
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width"),
            tag("title", f"Run {_text(report['run'])}"),
            tag("style", _STYLE),
        )
        return f"<!doctype html>{tag('html', ''.join(head) + tag('body', self.body(report)), lang='en')}\n"

    def _log(self, event: Logged) -> None:
        for name, value in (event.values or {}).items():
            if isinstance(value, str):  # It is not finite.
                continue
            curve = self._curves.setdefault(name, [])
            step = event.step if event.step is not None else event.epoch if event.epoch is not None else len(curve)
            curve.append((float(step), float(value)))
            if len(curve) > 2 * _POINTS:
                del curve[1:-1:2]

    def charts(self, axis: str) -> Iterable[str]:
        """Yield a chart of all losses, and one of each further number.

        axis : what the curves run over.
        """
        losses = {name: curve for name, curve in self._curves.items() if "loss" in name}
        others = [{name: curve} for name, curve in self._curves.items() if name not in losses]
        for curves in [losses, *others][:_CHARTS]:
            if curves:
                yield _chart(curves, axis)


def of_history(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the curves of a training's history (one dict an epoch) as HTML."""
    page = RunPage()
    for entry in history:
        numbers = {name: value for name, value in entry.items() if isinstance(value, float)}
        page.add(Logged(rank=0, epoch=entry.get("epoch"), values=numbers))
    return "".join(page.charts("epoch"))


def _heading(report: Mapping[str, Any]) -> str:
    ranks = len(report["ranks"])
    size = f"{ranks} rank{'s' * (ranks != 1)}" if ranks else "no rank was ever there"
    size = f"a query that scores, {_text(query)}" if (query := report["settings"].get("query")) else size
    if report["seconds"] is None:
        return f"<h2>Run {_text(report['run'])}: {size}, since {_text(report['started'])}</h2>"
    ended = f"{'succeeded' if report['ok'] else 'failed'} after {report['seconds']:.1f} s"
    parts = [f"<h2>Run {_text(report['run'])} {ended}: {size}</h2>"]
    if not report["ok"]:
        parts.append(f"<pre>{_text(report.get('error') or _failure(report['failure']))}</pre>")
    if saved := report.get("checkpoint"):
        parts.append(f"<p>Newest checkpoint: step {saved['step']:,}, {_text(saved['path'])}</p>")
    return "".join(parts)


def _failure(failure: Mapping[str, Any] | None) -> str:
    """Return what is known where a report of an earlier version does not have the error's own text."""
    if failure is None:
        return "The report does not say why."
    who = "it" if failure["rank"] is None else f"rank {failure['rank']}"
    return f"{who} failed ({failure['how']}): {failure['type']} {failure['text']}\n\n{failure['traceback']}"


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for facts in ranks:
        row = {name: value for name, value in facts.items() if name not in ("shards", "logged", "trace")}
        for shard, counts in facts.get("shards", {}).items():
            row |= {f"{shard}: {name}": f"{value:,}" for name, value in counts.items()}
        rows.append(row | _last(facts.get("logged", {})))
    columns = dict.fromkeys(name for row in rows for name in row)
    used = [name for name in columns if any(row.get(name) not in ("", None, []) for row in rows)]
    return section("Ranks", table(used, [[row.get(name, "") for name in used] for row in rows]))


def _last(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank has logged last; steps and epochs from 1, as in messages and on a terminal."""
    numbers = {f"last {name}": value for name, value in logged.items() if name not in ("steps", "epochs")}
    for name in ("step", "epoch"):
        if (count := logged.get(name)) is not None:
            most = logged.get(f"{name}s")
            numbers[f"last {name}"] = f"{count + 1:,}" + (f" of {most:,}" if most is not None else "")
    return numbers


def _times(report: Mapping[str, Any]) -> str:
    """Return bars of the run's phases, and of the sections of each rank's steps where they were traced."""
    phases, before = {}, 0.0
    until = [*report["seconds_until"].items(), *([("end", report["seconds"])] if report["seconds"] else [])]
    for name, seconds in sorted(until, key=lambda item: item[1]):
        phases[f"until {name.replace('_', ' ')}"] = seconds - before
        before = seconds
    bars = [("the run", phases)] if phases else []
    bars += [(f"rank {facts['rank']}", facts["trace"]["seconds"]) for facts in report["ranks"] if "trace" in facts]
    verdict = f"<p>{_text(report['verdict'])}</p>" if report.get("verdict") else ""
    return section("Where the time went", verdict + "".join(_bar(name, parts) for name, parts in bars))


def _bar(name: str, seconds: Mapping[str, float]) -> str:
    whole = sum(seconds.values()) or 1.0
    parts, legend, left = [], [], 0.0
    for number, (section, value) in enumerate(seconds.items()):
        color, share = _COLORS[number % len(_COLORS)], value / whole
        width = share * _WIDTH
        parts.append(tag("rect", x=left, width=width, height=_MARGIN, fill=color))
        legend.append(f"{tag('span', '■', style=f'color:{color}')} {_text(section)} {value:.1f} s ({share:.0%})")
        left += width
    return f"<p>{_text(name)}<br>{_drawing(_MARGIN, parts)}<br>{', '.join(legend)}</p>"


def _chart(curves: Mapping[str, Sequence[tuple[float, float]]], axis: str) -> str:
    points = [point for curve in curves.values() for point in curve]
    (first, last), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    right = _WIDTH / ((last - first) or 1)
    up = (_HEIGHT - 2 * _MARGIN) / ((high - low) or 1)
    parts = [
        tag("text", f"{high:.4g}", x=0, y=12),
        tag("text", f"{low:.4g}", x=0, y=_HEIGHT - _MARGIN - 2),
        tag("text", f"{first:,.0f}", x=0, y=_HEIGHT - 2),
        tag("text", f"{axis} {last:,.0f}", x=_WIDTH, y=_HEIGHT - 2, text_anchor="end"),
    ]
    for number, (name, curve) in enumerate(curves.items()):
        color = _COLORS[number % len(_COLORS)]
        for attempt in _attempts(curve):
            places = [(right * (x - first), _HEIGHT - _MARGIN - up * (y - low)) for x, y in attempt]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(tag("polyline", points=path, fill="none", stroke=color, stroke_width=1.5))
            parts += [tag("circle", cx=x, cy=y, r=2, fill=color) for x, y in places if len(places) < 30]
        parts.append(tag("text", _text(name), x=_WIDTH, y=12 + 14 * number, text_anchor="end", fill=color))
    return f"<p>{_drawing(_HEIGHT, parts)}</p>"


def _attempts(curve: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return the parts of a curve, which goes back to an earlier step where the gang was started again."""
    parts = [[curve[0]]]
    for before, after in pairwise(curve):
        if after[0] < before[0]:
            parts.append([])
        parts[-1].append(after)
    return parts


def _drawing(height: int, parts: Sequence[str]) -> str:
    return tag("svg", "".join(parts), viewBox=f"0 -2 {_WIDTH} {height + 2}", width=_WIDTH)


def tag(element: str, inner: str = "", /, **attributes: float | str) -> str:
    """Return an element with this HTML within it; `text_anchor` is the attribute `text-anchor`."""
    opened = [element]
    for key, value in attributes.items():
        text = f"{value:.1f}" if isinstance(value, float) else value
        opened.append(f"{key.replace('_', '-')}='{text}'")
    return f"<{' '.join(opened)}>" + (f"{inner}</{element}>" if element != "meta" else "")


def _model(model: Mapping[str, Any] | None) -> str:
    rows = [
        (kind, facts["name"], ", ".join(facts.get("columns", ())), facts["dtype"], list(facts["shape"]))
        for kind in ("inputs", "outputs")
        for facts in (model or {}).get(kind, ())
    ]
    return section("Model", table(("", "name", "columns", "dtype", "shape of a row"), rows))


def _retries(retries: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [(f"{r['number']} of {r['of']}", r.get("start") or "the beginning", r["reason"]) for r in retries]


def _settings(report: Mapping[str, Any]) -> str:
    command = [("command", report["command"])] if report.get("command") else []
    place = table(("", ""), [("run directory", report["run_dir"]), *command])
    rest = table(("", ""), [*report["settings"].items(), *report["versions"].items()])
    return f"{place}<details><summary>all</summary>{rest}</details>"


def section(title: str, content: str) -> str:
    """Return HTML below a heading; "" where there is none."""
    return f"<h3>{_text(title)}</h3>{content}" if content else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table of HTML, every text escaped; "" without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{_text(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{_text(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(value: Any) -> str:
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))
