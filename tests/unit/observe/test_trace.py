"""The time of the steps by section: sections that add up, from real steps, and the verdict on what they wait for."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

import tritium as tr
from tritium.cli import main
from tritium.errors import BadSetting
from tritium.observe.trace import SECTIONS, Trace
from tritium.observe.verdict import verdict


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_innermost_section_counts_and_all_add_up() -> None:
    clock = Clock()
    trace = Trace(clock)

    def source() -> Any:
        for _ in range(2):
            clock.now += 1
            with trace.within("rows to arrive"):
                clock.now += 2
            with trace.within("copy to device"):
                clock.now += 4
            yield "batch"

    for _ in trace.batches(source()):
        clock.now += 8
        with trace.within("forward"), trace.within("forward"):
            clock.now += 16
            with trace.within("communicate"):
                clock.now += 32
        with trace.within("backward"):
            trace.enter("forward")  # never left, as of a step that raised
            clock.now += 64
    clock.now += 1000  # after the last epoch
    found = trace.report()
    assert found is not None
    assert found["steps"] == 2
    assert found["arrive"] == 4
    assert found["seconds"] == {
        "wait for data": 2 * (1 + 2),
        "copy to device": 2 * 4,
        "forward": 2 * (16 + 64),
        "backward": 0,
        "communicate": 2 * 32,
        "optimizer": 0,
        "other": 2 * 8,
    }


def test_other_threads_and_a_run_without_batches_say_nothing() -> None:
    clock = Clock()
    trace = Trace(clock)
    assert trace.report() is None

    def elsewhere() -> None:
        with trace.within("forward"):
            clock.now += 5

    for _ in trace.batches(iter([1])):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    found = trace.report()
    assert found is not None
    assert found["seconds"]["forward"] == 0
    assert found["seconds"]["other"] == 5


def train(slow_rank: int | None) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    world = tr.world()
    layers = (torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(net.parameters())
    pause = threading.Event()
    for epoch in world.shard("train").epochs(2, batch_size=32, device="cpu"):
        for batch in epoch:
            loss = net(batch["x"]).square().mean()
            loss.backward()
            if world.rank == slow_rank:
                pause.wait(0.05)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


@pytest.fixture
def table() -> pa.Table:
    x = np.random.default_rng(0).random((640, 8), dtype=np.float32)
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 8)})


@pytest.mark.processes
def test_of_a_real_training(table: pa.Table, tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"on": "driver", "progress": False, "output": "none", "data": {"train": table}}
    tr.launch(train, ranks=2, args=(1,), trace=True, run_dir=str(tmp_path), **quiet)
    report = json.loads(tmp_path.joinpath("report.json").read_text())
    traces = [rank["trace"] for rank in report["ranks"]]
    for trace in traces:
        assert trace["steps"] == 20
        assert list(trace["seconds"]) == list(SECTIONS)
        assert all(trace["seconds"][name] > 0 for name in ("wait for data", "forward", "backward", "optimizer"))
    assert traces[1]["seconds"]["other"] > 20 * 0.05
    assert traces[0]["seconds"]["communicate"] > 0.5 * 20 * 0.05, "DDP's wait for rank 1, within backward"
    assert re.match(r"rank 0 waits for the exchange .* rank 1 is slower .* most of it in 'other'", report["verdict"])
    assert f"where the time went: {report['verdict']}" in report["notes"]
    shown = CliRunner().invoke(main, ["report", str(tmp_path)]).output
    assert re.search(r"  20 steps of [\d.]+ ms: wait for data \d+%, copy to device 0%, forward", shown)


def train_compiled() -> int:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = torch.nn.Linear(8, 16), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(16, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.rest(self.first(x))
            return output

    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net = torch.compile(Net(), backend=backend, fullgraph=True)
    for epoch in tr.world().shard("train").epochs(2, batch_size=32, device="cpu"):
        for batch in epoch:
            net(batch["x"]).square().mean().backward()
    return len(graphs)


@pytest.mark.processes
def test_a_compiled_model_stays_one_graph(table: pa.Table, tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"on": "driver", "progress": False, "output": "none", "data": {"train": table}}
    assert tr.launch(train_compiled, ranks=1, trace=True, framework="torch", run_dir=str(tmp_path), **quiet) == [1]
    (rank,) = json.loads(tmp_path.joinpath("report.json").read_text())["ranks"]
    assert rank["trace"]["seconds"]["forward"] > 0


@pytest.mark.processes
def test_without_it_nothing_is_measured(table: pa.Table, tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"on": "driver", "progress": False, "output": "none", "data": {"train": table}}
    tr.launch(train, ranks=1, args=(None,), run_dir=str(tmp_path), **quiet)
    report = json.loads(tmp_path.joinpath("report.json").read_text())
    assert report["verdict"] is None
    assert "trace" not in report["ranks"][0]


def test_in_this_process_it_is_refused() -> None:
    with pytest.raises(BadSetting, match='trace=True hooks into torch, which on="here" would leave in this process'):
        tr.Gang(on="here", trace=True)


def trace_of(arrive: float = 0.0, **seconds: float) -> dict[str, Any]:
    named = {name.replace("_", " "): value for name, value in seconds.items()}
    return {"steps": 10, "arrive": arrive, "seconds": {name: named.get(name, 0.0) for name in SECTIONS}}


VERDICTS: list[tuple[Callable[[], dict[int, Any]], str]] = [
    (
        lambda: {0: trace_of(forward=5, backward=5), 1: trace_of(4, wait_for_data=5, forward=5)},
        r"rank 1 waits for data 50% of the time: Spark's source or shuffle is the bottleneck",
    ),
    (
        lambda: {0: trace_of(wait_for_data=5, forward=5)},
        r"rank 0 waits for data 50%.*reading its rows is the bottleneck",
    ),
    (lambda: {0: trace_of(copy_to_device=2, forward=5)}, r"rank 0 copies to its device 29%"),
    (
        lambda: {0: trace_of(communicate=5, forward=5), 1: trace_of(communicate=5, forward=5)},
        r"rank 0 waits for the exchange between ranks 50% of the time: larger batches",
    ),
    (
        lambda: {0: trace_of(communicate=5, forward=5), 1: trace_of(forward=9, optimizer=1)},
        r"rank 1 is slower \(10\.0 s of its own work, rank 0 5\.0 s\), most of it in 'forward'",
    ),
    (lambda: {0: trace_of(forward=4, other=6)}, r"60% of the time goes into neither data nor model nor exchange"),
    (lambda: {0: trace_of(wait_for_data=0.2, forward=9.8)}, r"the ranks compute 98% of the time, and wait for data 2%"),
]


@pytest.mark.parametrize(("traces", "words"), VERDICTS)
def test_one_line_says_what_stands_in_the_way(traces: Callable[[], dict[int, Any]], words: str) -> None:
    assert re.search(words, verdict(traces()))
