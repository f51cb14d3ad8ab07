"""Profile chosen steps with torch's profiler for the timeline (rank)."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

from tritium.frameworks.framework import Place
from tritium.observe.trace import Trace, profiled

MOST_EVENTS = 1_000_000
"""So many events of all ranks together are kept: some 200 MB of trace.json, which a browser can still open."""
_AT_ONCE = 10_000


class StepProfiler:
    """Runs `torch.profiler.profile` in the steps that the setting `trace` names, and sends what it has recorded."""

    def __init__(self, trace: Trace, setting: str, place: Place) -> None:
        self._trace, self._setting, self._place = trace, setting, place
        self._steps = profiled(setting)
        self._most = self._left = MOST_EVENTS // place.size
        self._running: Any = None
        self._arrows = itertools.count(1)
        self._taken = self._begun_at = self._profiled = 0

    def on_step(self, step: int | None) -> None:
        """Run from the beginning of the first of the steps to the end of the last one, but not between epochs."""
        self._taken = self._taken if step is None else step
        if self._running is not None:
            if step not in self._steps:
                self._end()
        elif step in self._steps and self._left and (torch := sys.modules.get("torch")) is not None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._begun_at, self._running = self._taken, torch.profiler.profile(activities=activities)
            self._running.start()

    def _end(self) -> None:
        profile, self._running = self._running, None
        profile.stop()
        self._profiled += self._taken - self._begun_at
        self._send(_exported(profile))

    def on_returned(self) -> None:
        """End a profile that is still running, and tell the user where no step was profiled."""
        if self._running is not None:  # The function has left its loop within a step.
            self._taken += 1
            self._end()
        if self._profiled or self._place.rank:
            return
        first, last = self._steps[0], self._steps[-1]
        if self._taken > first:
            reason = f"the function had not imported torch before step {last}. Import it before the first batch"
        else:
            reason = (
                f"steps {first} to {last} were to be profiled, and rank 0 took {self._taken:,} batches. Choose other "
                'steps: trace="torch:0-4"'
            )
        self._place.note(f"trace={self._setting!r} has profiled no step: {reason}")

    def _send(self, exported: dict[str, Any]) -> None:
        events = _events(exported["traceEvents"], self._arrows)
        if len(events) > self._left:
            first = self._steps[0]
            advice = f'. Profile fewer steps: trace="torch:{first}-{first}"' if len(self._steps) > 1 else ""
            self._place.note(
                f"torch's profile of rank {self._place.rank} is cut: trace.json keeps {MOST_EVENTS:,} events of all "
                f"{self._place.size} ranks, the first {self._most:,} of each, so {len(events) - self._left:,} are left "
                f"out{advice}"
            )
        events = events[: self._left]
        self._left -= len(events)
        assert self._trace.on_spans is not None
        for start in range(0, len(events), _AT_ONCE):
            body = zlib.compress(json.dumps(events[start : start + _AT_ONCE]).encode(), 1)
            self._trace.on_spans(body, epoch=exported.get("baseTimeNanoseconds", 0) / 1e9, torch=True)


def _exported(profile: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        with open(f"{folder}/trace.json", encoding="utf-8", errors="replace") as file:
            exported: dict[str, Any] = json.load(file, strict=False)  # Names of kernels may hold any character.
    return exported


def _events(entries: list[dict[str, Any]], arrows: Iterator[int]) -> list[dict[str, Any]]:
    """Return the spans and arrows of an exported trace by time, each with its `track` instead of `pid` and `tid`.

    Its processes are this one and the GPUs. Those with a text for a number hold marks of the profiler itself.

    arrows : yields their new numbers: in every exported trace those of torch begin at 1.
    """
    numbers: dict[tuple[str, int], int] = {}
    labels: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for entry in entries:
        if entry["name"] == "process_labels":
            labels[entry["pid"]] = entry["args"]["labels"]
        elif entry["name"] == "thread_name":
            threads[entry["pid"], entry["tid"]] = entry["args"]["name"].strip()
    events = []
    for entry in entries:
        pid, tid = entry.pop("pid"), entry.pop("tid")
        if entry["ph"] in ("X", "s", "f") and isinstance(pid, int):
            if "id" in entry:
                key = entry["cat"], entry["id"]
                entry["id"] = numbers[key] = numbers.get(key) or next(arrows)
            events.append({**entry, "track": f"torch, {labels.get(pid, pid)}, {threads.get((pid, tid), tid)}"})
    return sorted(events, key=lambda event: float(event["ts"]))
