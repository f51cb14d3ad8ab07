"""The timeline: Chrome's trace format, steps with their sections, ranks of two hosts on one clock."""

from __future__ import annotations

import base64
import io
import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from tritium.errors import RankFailed
from tritium.events import CheckpointSaved, GangFormed, GangStalled, GangStarted, Note, RowsCounted, stamped
from tritium.frameworks import torch_profile
from tritium.gang.supervisor.host_clock import HostClock
from tritium.observe.timeline import SparkTask, write
from tritium.observe.trace import SPANS, Trace

TABLE = pd.DataFrame({"x": np.arange(200.0)})


def checked(text: str) -> dict[str, Any]:
    """Return a timeline, after a check that it is one: what Chrome's format requires, and spans nest."""
    timeline: dict[str, Any] = json.loads(text)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for entry in timeline["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid"} <= entry.keys(), entry
        assert entry["ph"] in "XiCMsf", entry
        assert isinstance(entry["ts"], int), entry
        if entry["ph"] == "X":
            assert entry["dur"] >= 0, entry
            tracks.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["ts"] + entry["dur"]))
    for (_, tid), spans in tracks.items():
        open_spans: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])) if tid == 0 else ():
            while open_spans and open_spans[-1] <= start:
                open_spans.pop()
            assert not open_spans or end <= open_spans[-1], "a span ends after the one around it"
            open_spans.append(end)
    return timeline


def train(epochs: int, fails: bool = False) -> None:
    world = tr.world()
    for epoch in world.shard("train").epochs(epochs, batch_size=10):
        for batch in epoch:
            time.sleep(0.001)
            world.gather(float(batch["x"].sum()))
        world.log(epoch=batch.epoch, loss=1.0)
        if fails:
            raise ValueError("it was to fail")


def traced(ranks: int, folder: Path, *args: Any) -> None:
    options: dict[str, Any] = {"data": {"train": TABLE}, "on": "driver", "progress": False, "run_dir": str(folder)}
    tr.launch(train, ranks=ranks, args=args, trace=True, **options)


@pytest.mark.processes
def test_two_ranks_are_on_one_timeline(tmp_path: Path) -> None:
    before = time.time()
    traced(2, tmp_path, 3)
    timeline = checked((tmp_path / "trace.json").read_text())
    spans = [entry for entry in timeline["traceEvents"] if entry["ph"] == "X"]
    assert all(before - 1 < entry["ts"] / 1e6 < time.time() + 1 for entry in spans)
    for rank in range(2):
        of_rank = [entry for entry in spans if entry["pid"] == rank]
        steps = [entry for entry in of_rank if entry["name"] == "step"]
        assert [entry["args"]["step"] for entry in steps] == list(range(30))
        names = {entry["name"] for entry in of_rank}
        assert {"wait for data", "communicate"} < names
        assert "rows of 'train' come: 100" in names
        # A rank waits within its own step for the slower of two, whose wait began later.
        assert sum(entry["dur"] for entry in of_rank if entry["name"] == "communicate") > 0
    errors = timeline["otherData"]["clock error of each rank, seconds"]
    assert errors.keys() == {"rank 0", "rank 1"}
    assert all(0 < error < 1 for error in errors.values()), errors
    names = {entry["args"]["name"] for entry in timeline["traceEvents"] if entry["name"] == "process_name"}
    assert {name.partition(" on ")[0] for name in names} == {"rank 0", "rank 1", "driver"}
    assert not (tmp_path / "spans").exists()
    counters = [entry for entry in timeline["traceEvents"] if entry["ph"] == "C"]
    assert {(entry["name"], entry["pid"]) for entry in counters} == {("loss", 0), ("loss", 1)}


@pytest.mark.processes
def test_a_run_that_fails_has_its_timeline_up_to_there(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        traced(1, tmp_path, 3, True)
    timeline = checked((tmp_path / "trace.json").read_text())
    assert (
        len([entry for entry in timeline["traceEvents"] if entry["name"] == "step"]) == 20
    )  # It raises after an epoch.
    (failure,) = (entry for entry in timeline["traceEvents"] if entry.get("cat") == "failed")
    assert failure["s"] == "g"
    assert "it was to fail" in failure["name"]


@pytest.mark.processes
def test_without_trace_there_is_none(tmp_path: Path) -> None:
    tr.launch(int, ranks=1, on="driver", progress=False, run_dir=str(tmp_path))
    assert not (tmp_path / "trace.json").exists()
    assert not (tmp_path / "spans").exists()


def test_events_and_spark_tasks_and_clocks_that_differ(tmp_path: Path) -> None:
    (tmp_path / "spans").mkdir()
    at = 1_700_000_000
    for rank, offset in ((0, 0.0), (1, -3600.0)):
        span = base64.b64encode(struct.pack("=4d", SPANS.index("step"), 5.0, 5.005, 7)).decode()
        clock = {"epoch": at - 5 - offset, "offset": offset, "error": 0.001 * (rank + 1)}
        line = json.dumps({**clock, "spans": span})
        (tmp_path / "spans" / f"rank-{rank}.jsonl").write_text(f"{line}\n")
    peers = [{"rank": rank, "host": f"host{rank}"} for rank in range(2)]
    events = [
        Note(text="of an earlier run"),
        GangStarted(ranks=2),
        GangFormed(peers=peers),
        RowsCounted(name="train", rank=1, rows=12),
        RowsCounted(name="train", rank=1, rows=34, ended=True),
        CheckpointSaved(rank=0, step=5, bytes=10, seconds=2.0, path="p"),
        GangStalled(text="rank 1 on host1 hangs: it never reached the all_reduce"),
    ]
    moments = [f"2023-11-14T22:13:{20 + number:02}.000+00:00" for number in range(len(events))]
    lines = [
        stamped(type(event)(**{**event.fields(), "time": moment}), "old" if not number else "r").to_json()
        for number, (event, moment) in enumerate(zip(events, moments, strict=True))
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    tasks = [
        SparkTask(3, "map", index, "0", "host0", at + start, 2.0, "SUCCESS") for index, start in enumerate((0, 1, 2))
    ]
    file = io.StringIO()
    write(tmp_path, file, run="r", tasks=tasks)
    timeline = checked(file.getvalue())
    by_name: dict[str, Any] = {entry["name"]: entry for entry in timeline["traceEvents"]}
    steps = [entry for entry in timeline["traceEvents"] if entry["name"] == "step"]
    assert [entry["ts"] for entry in steps] == [at * 1_000_000] * 2
    assert timeline["otherData"]["clock error of each rank, seconds"] == {"rank 0": 0.001, "rank 1": 0.002}
    rows, saved = by_name["rows of 'train' come: 34"], by_name["checkpoint of step 5"]
    assert (rows["dur"], rows["pid"]) == (3_000_000, 1)
    assert (saved["ts"], saved["dur"]) == ((at + 3) * 1_000_000, 2_000_000)
    assert by_name["rank 1 on host1 hangs: it never reached the all_reduce"]["s"] == "g"
    assert "of an earlier run" not in by_name
    lanes = [by_name[f"stage 3, task {index}"]["tid"] for index in range(3)]
    assert lanes == [0, 1, 0]
    names = {entry["args"]["name"] for entry in timeline["traceEvents"] if entry["name"] == "process_name"}
    assert names == {"rank 0 on host0", "rank 1 on host1", "driver", "Spark's executor 0 on host0"}


def train_with_torch(batch_size: int, most: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for epoch in tr.world().shard("train").epochs(3, batch_size=batch_size):
        for batch in epoch:
            net(batch["x"].unsqueeze(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            most -= 1
            if not most:
                return
    dist.destroy_process_group()


def profiled(folder: Path, setting: str, batch_size: int, most: int = 1000) -> dict[str, Any]:
    options: dict[str, Any] = {"on": "driver", "progress": False, "framework": "torch", "run_dir": str(folder)}
    tr.launch(train_with_torch, ranks=2, args=(batch_size, most), data={"train": TABLE}, trace=setting, **options)
    return checked((folder / "trace.json").read_text())


@pytest.mark.processes
@pytest.mark.parametrize(("setting", "steps"), [("torch", range(5, 10)), ("torch:8-11", range(8, 12))])
def test_operators_of_torch_lie_in_the_steps_that_were_chosen(setting: str, steps: range, tmp_path: Path) -> None:
    timeline = profiled(tmp_path, setting, 10)  # An epoch has ten steps.
    entries = timeline["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    for rank in range(2):
        spans = [entry for entry in entries if entry["ph"] == "X" and entry["pid"] == rank]
        of_steps = {e["args"]["step"]: (e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"] == "step"}
        assert len(of_steps) == 30
        operators = [e for e in spans if e["name"].startswith("aten::")]
        assert all(tracks[rank, e["tid"]].startswith("torch, CPU, thread ") for e in operators)
        error = timeline["otherData"]["clock error of each rank, seconds"][f"rank {rank}"]
        slack = 2 * error * 1e6 + 1  # The clock of spans and that of operators are read apart; both are rounded.
        for step in steps:
            start, end = of_steps[step]
            within = {e["name"] for e in operators if start - slack <= e["ts"] and e["ts"] + e["dur"] <= end + slack}
            assert {"aten::linear", "aten::mean"} <= within, (step, within)
        first, last = of_steps[steps[0]][0], of_steps[steps[-1]][1]
        assert all(first - slack <= e["ts"] and e["ts"] + e["dur"] <= last + slack for e in operators)
    arrows = [entry["id"] for entry in entries if entry["ph"] == "s"]
    assert arrows
    assert len(set(arrows)) == len(arrows), "an arrow leads from one rank to another"
    assert not (tmp_path / "spans").exists()


@pytest.mark.processes
def test_steps_are_profiled_when_the_function_leaves_its_loop_in_one(tmp_path: Path) -> None:
    entries = profiled(tmp_path, "torch:1-9", 10, most=4)["traceEvents"]
    for rank in range(2):
        assert [entry for entry in entries if entry["pid"] == rank and entry["name"] == "aten::linear"]
    assert not [note for note in json.loads((tmp_path / "report.json").read_text())["notes"] if "profiled" in note]


@pytest.mark.processes
def test_that_no_step_was_profiled_is_told(tmp_path: Path) -> None:
    timeline = profiled(tmp_path, "torch:6-9", 50)  # There are six steps.
    assert not [entry for entry in timeline["traceEvents"] if entry["name"].startswith("aten::")]
    notes = json.loads((tmp_path / "report.json").read_text())["notes"]
    assert [note for note in notes if "has profiled no step" in note] == [
        "trace='torch:6-9' has profiled no step: steps 6 to 9 were to be profiled, and rank 0 took 6 batches. Choose "
        'other steps: trace="torch:0-4"'
    ]


def test_events_of_torch_get_the_gangs_clock_and_the_tracks_of_their_rank(tmp_path: Path) -> None:
    (tmp_path / "spans").mkdir()
    cpu, gpu = "torch, CPU, thread 7", "torch, GPU 0, stream 7"
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": 10.4, "dur": 5.3, "track": cpu}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 12.0, "dur": 2.0, "track": gpu}
    arrow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 3, "ts": 11.0, "track": cpu}
    at = 1_700_000_000
    for rank, offset in ((0, 0.0), (1, -3600.0)):
        body = base64.b64encode(zlib.compress(json.dumps([operator, arrow, kernel]).encode())).decode()
        line = json.dumps({"epoch": at - offset, "offset": offset, "error": 0.001, "torch": True, "spans": body})
        (tmp_path / "spans" / f"rank-{rank}.jsonl").write_text(f"{line}\n")
    (tmp_path / "events.jsonl").write_text("")
    file = io.StringIO()
    write(tmp_path, file, run="r", tasks=[])
    entries = checked(file.getvalue())["traceEvents"]
    for rank in range(2):
        of_rank = {entry["name"]: entry for entry in entries if entry["pid"] == rank and entry["ph"] != "M"}
        zero = at * 1_000_000
        assert (of_rank["aten::linear"]["ts"], of_rank["aten::linear"]["dur"]) == (zero + 10, 6)
        assert (of_rank["gemm"]["ts"], of_rank["gemm"]["dur"]) == (zero + 12, 2)
        assert of_rank["ac2g"]["id"] % 2**32 == 3
        assert {of_rank["aten::linear"]["tid"], of_rank["ac2g"]["tid"]} == {2}
        assert of_rank["gemm"]["tid"] == 3
    assert len({entry["id"] for entry in entries if entry["ph"] == "s"}) == 2
    names = [entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"]
    assert names == [cpu, gpu] * 2


@pytest.mark.processes  # It imports torch.
def test_of_many_events_of_torch_the_first_ones_are_kept_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch_profile, "MOST_EVENTS", 80)
    kept: list[dict[str, Any]] = []
    notes: list[str] = []
    trace = Trace()
    trace.on_spans = lambda body, *, torch=False, **_: kept.extend(json.loads(zlib.decompress(body)) if torch else ())
    place: Any = SimpleNamespace(rank=3, size=4, note=notes.append)
    trace.profiler = torch_profile.StepProfiler(trace, "torch:1-2", place)
    values = torch.ones(3)
    for _ in range(2):  # Two epochs of two steps: the second begins with step 2.
        for _ in trace.batches(iter(range(2))):
            for _ in range(30):
                values = values.sin()
    trace.profiler.on_returned()
    assert len(kept) == 20
    assert {event["name"] for event in kept} == {"aten::sin"}
    times = [event["ts"] for event in kept]
    assert times == sorted(times)
    (note,) = notes
    assert "rank 3 is cut: trace.json keeps 80 events of all 4 ranks, the first 20 of each" in note
    assert 'Profile fewer steps: trace="torch:1-1"' in note


def test_the_time_of_a_profiler_is_no_steps() -> None:
    clock = [100.0]

    class Slow:
        def on_step(self, step: int | None) -> None:
            clock[0] += 50

        def on_returned(self) -> None:
            pass

    trace = Trace(lambda: clock[0])
    trace.on_spans = lambda body, epoch: None
    trace.profiler = Slow()
    for _ in trace.batches(iter(range(3))):
        clock[0] += 2
    report = trace.report()
    assert report is not None
    assert report["seconds"]["other"] == 3 * 2


def test_the_fastest_answer_sets_a_clock_until_it_is_old() -> None:
    clock = HostClock()
    assert clock.fields() == {"offset": 0.0, "error": None}
    now = time.time()
    clock.on_answer(now - 1.0, now + 9.5, now)
    assert clock.fields()["offset"] == pytest.approx(10.0)
    clock.on_answer(now - 0.01, now + 5, now)
    clock.on_answer(now - 2.0, now, now)  # A slow answer says less.
    assert clock.fields()["offset"] == pytest.approx(5.005)
    assert clock.fields()["error"] == pytest.approx(0.005, abs=1e-3)
    clock.on_answer(now + 3600 - 0.3, now + 3600, now + 3600)  # After an hour the clock may have gone wrong by more.
    assert clock.fields()["offset"] == pytest.approx(0.15)


def test_of_many_steps_fewer_and_fewer_are_recorded() -> None:
    spans: list[tuple[float, ...]] = []
    trace = Trace()
    trace.on_spans = lambda body, epoch: spans.extend(struct.iter_unpack("=4d", body))
    steps = 100_000

    def batches() -> Iterator[int]:
        yield from range(steps)

    for _ in trace.batches(batches()):
        pass
    recorded = [step for number, _, _, step in spans if SPANS[int(number)] == "step"]
    assert recorded == sorted(recorded)
    assert len(spans) < 80_000
    assert recorded[:5000] == list(range(5000))
    assert recorded[-1] > 99_900
