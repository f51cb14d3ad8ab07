"""The table at the end of `make chaos`: how often each fault hit each phase of a run, and the outcomes."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .faults import ORDER, WEIGHTS


def table(lines: Iterable[str]) -> list[str]:
    """Return rows of Markdown with the figures of all rounds, by fault and phase; then the rounds that failed."""
    figures: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failed = set()
    for line in lines:
        figure = json.loads(line)
        figures.setdefault((figure["fault"], figure["phase"]), []).append(figure)
        if figure["failed"]:
            failed.add(figure["seed"])
    rows = ["| fault | phase | times | outcomes | median | worst |", "|---|---|---|---|---|---|"]
    for fault in WEIGHTS:
        for phase in ORDER:
            if found := figures.get((fault, phase)):
                outcomes = Counter(one["outcome"] for one in found).most_common()
                seconds = [one["seconds"] for one in found]
                told = ", ".join(f"{outcome}: {count}" for outcome, count in outcomes)
                times = f"{statistics.median(seconds):.1f} s | {max(seconds):.1f} s"
                rows.append(f"| {fault} | {phase} | {len(found)} | {told} | {times} |")
    seeds = {one["seed"] for found in figures.values() for one in found}
    faults = sum(map(len, figures.values()))
    rows += ["", f"{len(seeds)} rounds with {faults} faults that hit; failed: {sorted(failed) or 'none'}"]
    return rows
