"""The timeline of a run, trace.json, in Chrome's trace format: Perfetto and chrome://tracing open it (driver).

A process of the file is a rank, the driver, or an executor of Spark. Times are those of the coordinator's clock, in
microseconds since 1970; `otherData` says by how much those of each host may be wrong.
"""

from __future__ import annotations

import base64
import itertools
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from tritium.errors import masked
from tritium.events import (
    CheckpointSaved,
    Event,
    GangFailed,
    GangFormed,
    GangRetried,
    GangStalled,
    GangStarted,
    Logged,
    RowsCounted,
    read,
)
from tritium.observe.entries import entry_of
from tritium.observe.run_directory import SPANS_FOLDER
from tritium.observe.trace import SPANS

_DRIVER = 1_000_000
"""The number of the driver's process, above those of all ranks; executors follow it."""
_STEPS, _BESIDE = 0, 1
"""The tracks of a rank: its steps, and what happens beside them. Those of torch's profiler follow."""


@dataclass(frozen=True)
class SparkTask:
    """A task of the run's Spark job. `start` and `seconds` are of the driver's clock; `start` since 1970."""

    stage: int
    stage_name: str
    index: int
    executor: str
    host: str
    start: float
    seconds: float
    status: str


def write(folder: Path, file: IO[str], *, run: str, tasks: Sequence[SparkTask]) -> None:
    """Write the timeline of the run with this id, of its events and spans in a run directory."""
    errors: dict[str, float | None] = {}
    places: dict[int, str] = {}
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    entries = itertools.chain(
        _of_ranks(folder / SPANS_FOLDER, errors),
        _of_events(_events(folder / "events.jsonl", run), places),
        _of_spark(tasks),
        _names(places, tasks),
    )
    for number, entry in enumerate(entries):
        file.write(",\n" * bool(number) + json.dumps(entry, ensure_ascii=False))
    other = {"run": run, "clock": "the coordinator's", "clock error of each rank, seconds": errors}
    file.write(f'\n], "otherData": {json.dumps(other)}}}\n')


def _events(path: Path, run: str) -> Iterator[Event]:
    with open(path, encoding="utf-8") as file:
        for text in file:  # Those of an earlier run may be of an older version.
            if json.loads(text).get("run") == run:
                yield read(text)


def _of_ranks(folder: Path, errors: dict[str, float | None]) -> Iterator[dict[str, Any]]:
    """Yield the spans of the ranks' steps and the events of torch's profiler, on the coordinator's clock.

    errors : gets the largest error of each rank.
    """
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.partition("-")[2])
        tracks: dict[str, int] = {}
        with open(path, encoding="utf-8") as file:
            for clock in map(json.loads, file):
                if (error := clock["error"]) is not None:
                    error = max(round(error, 6), errors.get(f"rank {rank}") or 0.0)
                errors[f"rank {rank}"] = error
                body, zero = base64.b64decode(clock["spans"]), clock["epoch"] + clock["offset"]
                if clock.get("torch"):
                    yield from _of_torch(json.loads(zlib.decompress(body)), zero * 1e6, rank, tracks)
                    continue
                for number, start, end, step in struct.iter_unpack("=4d", body):
                    name = SPANS[int(number)]
                    first, last = (round((zero + moment) * 1e6) for moment in (start, end))
                    args = {"args": {"step": int(step)}} if name == "step" else {}
                    yield _span(name, rank, _STEPS, first, last - first) | args


def _of_torch(
    events: Iterable[dict[str, Any]], zero: float, rank: int, tracks: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield events of torch's profiler, which has spans and the arrows between them.

    zero   : the microseconds since 1970 from which their times count.
    tracks : the numbers of the tracks by name.
    """
    for event in events:
        track = event.pop("track")
        if track not in tracks:
            tracks[track] = _BESIDE + 1 + len(tracks)
            yield _about("thread_name", rank, tracks[track], name=track)
        start, end = (round(zero + event["ts"] + length) for length in (0, event.get("dur", 0)))
        entry = {**event, "ts": start, "pid": rank, "tid": tracks[track]}
        if "dur" in event:  # Both ends are rounded, so that what lies within another span still does.
            entry["dur"] = end - start
        if "id" in event:  # Ranks must not share the numbers of arrows.
            entry["id"] += rank << 32
        yield entry


def _of_events(events: Iterable[Event], places: dict[int, str]) -> Iterator[dict[str, Any]]:
    """Yield what happened; `places` gets the host of each rank, that of the last attempt that had it."""
    begun = 0
    for event in events:
        at = round(datetime.fromisoformat(event.time).timestamp() * 1e6)
        if not begun or isinstance(event, GangStarted | GangRetried):
            begun = at
        if isinstance(event, GangFormed):
            places.update((int(peer["rank"]), str(peer["host"])) for peer in event.peers)
        if isinstance(event, RowsCounted):
            if event.ended:
                name = f"rows of {event.name!r} come: {event.rows:,}"
                yield _span(name, event.rank, _BESIDE, begun, at - begun)
        elif isinstance(event, Logged):
            numbers = {name: value for name, value in (event.values or {}).items() if not isinstance(value, str)}
            for name, value in numbers.items():
                yield {"name": name, "ph": "C", "ts": at, "pid": event.rank, "tid": _STEPS, "args": {name: value}}
        elif isinstance(event, CheckpointSaved):
            length = round(event.seconds * 1e6)
            yield _span(f"checkpoint of step {event.step}", event.rank or 0, _BESIDE, at - length, length)
        elif (entry := entry_of(event)) is not None:
            stop = isinstance(event, GangStalled | GangFailed)
            yield {
                "name": masked(entry.whole), "cat": event.kind, "ph": "i", "ts": at, "pid": _DRIVER, "tid": 0,
                "s": "g" if stop else "p",
            }  # fmt: skip


def _of_spark(tasks: Sequence[SparkTask]) -> Iterator[dict[str, Any]]:
    """Yield Spark's tasks: a process for each executor, and a track for each of its tasks that run at once."""
    executors = _executors(tasks)
    free: dict[str, list[int]] = {}
    for task in sorted(tasks, key=lambda task: task.start):
        start, length = round(task.start * 1e6), round(task.seconds * 1e6)
        ends = free.setdefault(task.executor, [])
        lane = next((number for number, end in enumerate(ends) if end <= start), len(ends))
        ends[lane : lane + 1] = [start + length]
        name = f"stage {task.stage}, task {task.index}"
        args = {"stage": task.stage_name, "status": task.status}
        yield _span(name, executors[task.executor], lane, start, length) | {"args": args}


def _executors(tasks: Iterable[SparkTask]) -> dict[str, int]:
    return {name: _DRIVER + 1 + number for number, name in enumerate(sorted({task.executor for task in tasks}))}


def _span(name: str, pid: int, tid: int, start: int, length: int) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": start, "dur": max(0, length), "pid": pid, "tid": tid}


def _names(places: Mapping[int, str], tasks: Sequence[SparkTask]) -> Iterator[dict[str, Any]]:
    """Yield the names of processes and tracks, and the order of the processes: ranks, driver, executors."""
    hosts = {task.executor: task.host for task in tasks}
    names = {rank: f"rank {rank} on {host}" for rank, host in places.items()} | {_DRIVER: "driver"}
    names |= {pid: f"Spark's executor {name} on {hosts[name]}" for name, pid in _executors(tasks).items()}
    for pid, name in names.items():
        yield _about("process_name", pid, 0, name=name)
        yield _about("process_sort_index", pid, 0, sort_index=pid)
    for rank in places:
        yield _about("thread_name", rank, _STEPS, name="steps")
        yield _about("thread_name", rank, _BESIDE, name="rows, checkpoints")


def _about(fact: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"name": fact, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}
