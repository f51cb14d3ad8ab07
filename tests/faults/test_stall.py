"""No hang goes unnoticed: it is reported with its rank, step, phase and stacks, within its bound."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import tritium as tr
from clusters import wait
from tritium.errors import RankFailed, Stalled, TritiumWarning
from tritium.gang.driver import local_processes as driver_run
from tritium.gang.supervisor.memory import Memory
from tritium.gang.supervisor.native_stacks import find_spy

LIMIT = 2.0  # stall_timeout
BOUND = 9.0  # seconds from the fault to the error: the limit, looks a second apart, stacks


def run(fn: Callable[..., Any], ranks: int = 2, **settings: Any) -> list[Any]:
    quiet = {"progress": False, "output": "none", "stall_timeout": LIMIT, "retries": 0}
    return tr.launch(fn, ranks=ranks, on="driver", **{**quiet, **settings})


def stalled(fn: Callable[..., Any], mark: Path, ranks: int = 2, **settings: Any) -> Stalled:
    """Return the error. `fn` touches `mark` just before its fault."""
    with pytest.raises(Stalled) as caught:
        run(fn, ranks, run_dir=str(mark.parent / "run"), **settings)
    assert time.time() - mark.stat().st_mtime < BOUND
    error = caught.value
    assert sorted(error.stacks) == list(range(ranks))
    for rank, text in error.stacks.items():
        assert (mark.parent / f"run/stacks/rank-{rank}.txt").read_text() == text
    return error


def test_a_frozen_process(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        world = tr.world()
        for epoch in world.shard("train").epochs(100, batch_size=1):
            for batch in epoch:
                if (world.rank, epoch.number, batch.step) == (1, 1, 3):
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGSTOP)
                world.barrier()

    error = stalled(train, mark, data={"train": pd.DataFrame({"x": range(40)})})
    assert (error.rank, error.step, error.phase) == (1, 4, "epoch 2, step 4")
    assert re.match(
        r"Rank 1 on \S+ hangs: epoch 2, step 4, no progress for [\d.]+ s; its process is stopped \(SIGSTOP, or "
        r"Ctrl-Z\)\.",
        str(error),
    )
    assert re.search(
        r"  rank 0 \(host \S+\): epoch 2, step 4, in barrier, in train\(\) at test_stall\.py:\d+", str(error)
    )
    assert "no stack: its process is stopped" in error.stacks[1]
    assert "in train" in error.stacks[0]


def test_a_rank_that_skips_a_collective(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, value = tr.world().rank, torch.ones(1)
        dist.all_reduce(value)
        mark.touch()
        if rank != 1:
            dist.all_reduce(value)

    error = stalled(train, mark, ranks=3, framework="torch")
    assert error.rank == 1
    first, *rest = str(error).splitlines()
    assert re.match(r"Rank 1 on \S+ is not where the others wait: its function has returned\.", first)
    assert "It never reached the all_reduce in which ranks 0, 2 wait" in first
    assert (
        "Collective number 2: ranks 0, 2 wait in all_reduce of Float [1]; rank 1 has not called it "
        "(last call: number 1)."
    ) in rest
    assert [line for line in rest if re.match(r"  rank 0 .*in train\(\) at test_stall\.py:\d+ → all_reduce", line)]


def test_a_rank_that_waits_in_another_place_than_the_rest(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for epoch in tr.world().shard("train").epochs(1, batch_size=1):
            for batch in epoch:
                if (tr.world().rank, batch.step) == (1, 3):
                    mark.touch()
                    threading.Event().wait()
                dist.all_reduce(torch.ones(1))

    error = stalled(train, mark, framework="torch", data={"train": pd.DataFrame({"x": range(40)})})
    assert (error.rank, error.step) == (1, 4)
    assert "It never reached the all_reduce in which rank 0 waits (step 4)." in str(error)
    behind, ahead = (line for line in str(error).splitlines() if line.startswith("  rank"))
    assert re.search(r"rank 1 .*in train\(\) at test_stall\.py:\d+ → wait", behind)
    assert re.search(r"rank 0 .*in train\(\) at test_stall\.py:\d+ → all_reduce", ahead)


def test_groups_whose_ranks_wait_for_each_other(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        pair, value = dist.new_group([0, 2]), torch.ones(2, 3)
        dist.barrier()
        mark.touch()
        if tr.world().rank == 0:
            dist.all_reduce(value, group=pair)
        dist.all_reduce(value)

    error = stalled(train, mark, ranks=3, framework="torch")
    text = str(error)
    assert re.search(
        r"Collective number (\d+): ranks 1, 2 wait in all_reduce of Float \[2, 3\]; rank 0 has not called it "
        r"\(last call: number \d+\)\.\n",
        text,
    )
    assert (
        "Collective number 1 of the group of ranks 0, 2: rank 0 waits in all_reduce of Float [2, 3]; rank 2 has not "
        "called it (no call known).\n"
    ) in text
    assert "Look at the network" not in text


def test_ranks_that_hang_after_a_collective_that_all_have_called(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for _ in range(3):
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        dist.barrier()
        mark.touch()
        threading.Event().wait()

    text = str(stalled(train, mark, ranks=3, framework="torch"))
    assert "Collective number" not in text
    assert "never reached" not in text


def test_native_stacks_follow_pythons_where_py_spy_is(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        import ctypes

        mark.touch()
        while True:  # The signal for the stacks ends it.
            ctypes.PyDLL(None).pause()  # With the interpreter's lock.

    stacks = stalled(train, mark, ranks=3).stacks
    for text in stacks.values():
        assert "in train" in text
        if find_spy([]) is None:
            assert "py-spy" not in text
        else:  # Three at once may take longer than a stall's report waits.
            assert re.search(r"^(Native stacks, by py-spy:|py-spy gave no native stacks)", text, re.MULTILINE)


def test_a_rank_whose_collectives_cant_be_read(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
        if tr.world().rank == 1:
            torch._C._distributed_c10d._dump_fr_trace_json = lambda: b"another form"
        mark.touch()
        if tr.world().rank == 0:
            dist.all_reduce(torch.ones(1))
        threading.Event().wait()

    error = stalled(train, mark, framework="torch")
    assert re.search(r"rank 0 waits in all_reduce of Float \[1\]; rank 1 does not answer\.\n", str(error))
    assert "The collectives that it has called are not known: JSONDecodeError" in error.stacks[1]
    assert "in train" in error.stacks[1]


def test_a_rank_that_averages_no_gradients_in_shared_memory(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        import numpy as np

        from tritium.frameworks.host_memory import HostMemory

        memory = HostMemory.shared(tr.world())
        assert memory is not None
        memory.mean([np.ones(8, "float32")])
        mark.touch()
        if tr.world().rank == 1:
            threading.Event().wait()
        memory.mean([np.ones(8, "float32")])

    error = stalled(train, mark, ranks=3)
    assert error.rank == 1
    assert "It never reached the mean in which ranks 0, 2 wait" in str(error)
    assert (
        "Collective number 2: ranks 0, 2 wait in mean of gradients; rank 1 has not called it (last call: number 1).\n"
    ) in str(error)


def test_a_deadlock_between_two_locks(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        one, two, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

        def backwards() -> None:
            with two:
                both.wait()
                with one:
                    pass

        if tr.world().rank == 1:
            threading.Thread(target=backwards, daemon=True).start()
            with one:
                both.wait()
                mark.touch()
                with two:
                    pass
        tr.world().barrier()

    error = stalled(train, mark)
    assert (error.rank, error.step, error.phase) == (1, None, "no step reported")
    assert "in backwards" in error.stacks[1]  # both threads are there
    assert "in train" in error.stacks[1]


def test_an_endless_call_that_holds_the_interpreters_lock(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def train() -> None:
        for epoch in tr.world().shard("train").epochs(1, batch_size=1):
            for batch in epoch:
                if (tr.world().rank, batch.step) == (1, 2):
                    mark.touch()
                    re.match(r"(a+)+b", "a" * 60)
                tr.world().barrier()

    error = stalled(train, mark, data={"train": pd.DataFrame({"x": range(40)})})
    assert (error.rank, error.step) == (1, 3)
    assert re.search(r"  rank 1 .*: step 3, in train\(\) at test_stall\.py:\d+ → match", str(error))


@pytest.mark.parametrize("what", ["a thread", "an exit handler"])
def test_what_keeps_a_rank_from_leaving_is_ended_and_costs_no_result(what: str, tmp_path: Path) -> None:
    def train() -> int:
        if tr.world().rank == 0:
            if what == "a thread":
                threading.Thread(target=threading.Event().wait).start()
            else:
                atexit.register(threading.Event().wait)
        return tr.world().rank

    began = time.monotonic()
    with pytest.warns(TritiumWarning, match=r"^Rank 0 on \S+ \(pid \d+\) was killed: its exit handlers and") as caught:
        assert run(train, run_dir=str(tmp_path)) == [0, 1]
    assert time.monotonic() - began < BOUND
    (said,) = caught
    assert "had not ended after 2 s (stall_timeout); it was in " in str(said.message)
    assert "after every function had returned" in str(said.message)
    assert "threading.py" in str(said.message), "its stacks"


def test_what_keeps_a_rank_from_leaving_is_only_told_where_stalls_are(tmp_path: Path) -> None:
    def train() -> int:
        atexit.register(time.sleep, 3.0)
        return 7

    match = r"has not left: its exit handlers and threads had not ended after 1 s \(stall_timeout\); it was in "
    with pytest.warns(TritiumWarning, match=match):
        assert run(train, 1, run_dir=str(tmp_path), stall_timeout=1.0, on_stall="report") == [7]


@pytest.mark.parametrize("shuffle", ["full", "stream"])
def test_a_source_that_stops_sending(shuffle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, told = tmp_path / "mark", tmp_path / "run/stacks/rank-1.txt"
    deal = driver_run.deal_tables

    def dealt(launch: Any) -> Any:
        plan, shards = deal(launch)

        def stops(batches: Iterator[Any]) -> Iterator[Any]:
            yield next(batches)
            mark.touch()
            wait(told.exists, "the stall is told", 30)  # on a cluster it would end with its task; here it is a thread

        return plan, [stops(shards[0]), shards[1]]

    monkeypatch.setattr(driver_run, "deal_tables", dealt)

    def train() -> int:
        return sum(batch.rows for epoch in tr.world().shard("train").epochs(1, batch_size=64) for batch in epoch)

    error = stalled(train, mark, data={"train": tr.Data(pd.DataFrame({"x": range(40_000)}), shuffle=shuffle)})
    assert error.rank == 0
    assert re.match(
        r"No rows came from the source for [\d.]+ s: rank 0 on \S+ has 8,192 rows of 'train' so far", str(error)
    )
    assert re.search(r"rank 0 \(host \S+\): (step \d+, )?waiting for rows of 'train'", str(error))


def test_report_only(tmp_path: Path) -> None:
    def train() -> str:
        tr.world().log(step=0)
        if tr.world().rank == 1:
            threading.Event().wait(3 * LIMIT)
        tr.world().barrier()
        return "done"

    run_ = tr.launch(
        train,
        ranks=2,
        on="driver",
        progress=False,
        stall_timeout=LIMIT,
        on_stall="report",
        run_dir=str(tmp_path / "run"),
    )
    assert run_ == ["done", "done"]
    events = (tmp_path / "run/events.jsonl").read_text().splitlines()
    assert len([line for line in events if '"kind": "stalled"' in line]) == 1
    assert [line for line in events if '"kind": "note"' in line and "rank 1 on" in line and "hangs" in line]
    assert "in train" in (tmp_path / "run/stacks/rank-1.txt").read_text()


class TestNoFalseAlarm:
    def test_a_slow_run_that_moves(self) -> None:
        def train() -> int:
            steps = 0
            for epoch in tr.world().shard("train").epochs(1, batch_size=1):
                for _ in epoch:
                    time.sleep(1.0)
                    steps += 1
            return steps

        assert run(train, data={"train": pd.DataFrame({"x": range(8)})}) == [4, 4]

    def test_a_long_calculation_without_steps_while_the_other_waits(self) -> None:
        def train() -> str:
            until = time.monotonic() + 3 * LIMIT
            while tr.world().rank == 0 and time.monotonic() < until:
                sum(range(1000))
            tr.world().barrier()
            return "done"

        assert run(train) == ["done", "done"]

    def test_a_calculation_that_logs_less_often_than_the_limit(self) -> None:
        def train() -> str:
            for step in range(2):
                until = time.monotonic() + 2 * LIMIT
                while time.monotonic() < until:
                    sum(range(1000))
                tr.world().log(step=step)
            return "done"

        assert run(train, 1) == ["done"]

    def test_ranks_in_a_collective_while_one_that_they_wait_for_moves(self) -> None:
        def train() -> str:
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
            tr.world().log(step=0)
            until = time.monotonic() + 3 * LIMIT
            while tr.world().rank == 0 and time.monotonic() < until:
                tr.world().store("large.bin", [b"piece"])
                time.sleep(LIMIT / 4)
            dist.all_reduce(torch.ones(1))
            return "done"

        assert run(train, framework="torch") == ["done", "done"]

    def test_a_rank_that_prints(self) -> None:
        def train() -> str:
            tr.world().log(step=0)
            for _ in range(3):
                time.sleep(LIMIT / 2)
                print("still there")
            return "done"

        assert run(train, 1) == ["done"]


CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Yield a real memory control group with a limit of 200 MB, version 1 or 2."""
    v2 = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if v2 else CGROUPS / "memory") / f"tritium-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(200 << 20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"this user may not make a memory control group: {error}")
    yield group
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:  # its last process is just going
            time.sleep(0.05)
    group.rmdir()


def test_out_of_memory_is_named_with_its_figures(cgroup: Path) -> None:
    def train() -> None:
        tr.world().barrier()
        if tr.world().rank == 1:
            cgroup.joinpath("cgroup.procs").write_text(str(os.getpid()))
            time.sleep(4)  # as a container's: the supervisor has seen the group before the end
            hoard = []
            while True:
                hoard.append(bytearray(os.urandom(1 << 20)))
        threading.Event().wait()

    with pytest.raises(RankFailed) as caught:
        run(train, stall_timeout=60)
    error = caught.value
    assert (error.rank, error.signal) == (1, "SIGKILL")
    assert re.search(
        r"was killed by SIGKILL: out of memory \(its cgroup's limit of 200 MB was reached: oom_kill 1; "
        r"peak [\d.]+ MB\)",  # of the rank, whatever this process had when it started it
        str(error),
    )
    assert error.memory["group_limit"] == 200 << 20
    assert error.memory["oom_kills"] == 1
    assert 20 << 20 < error.memory["peak"] < 400 << 20


def test_a_rank_that_has_just_ended_is_still_of_its_control_group(cgroup: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        cgroup.joinpath("cgroup.procs").write_text(str(process.pid))
        memory = Memory(process.pid)
        memory.look()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its exit code yet
        memory.look()
        assert memory.figures(None)["group"] == str(cgroup)


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_a_rank_that_someone_killed_has_figures_too(seconds: float) -> None:
    """One that ends before its supervisor has looked at it, as it may at once, leaves too little to tell."""

    def train() -> None:
        tr.world().log(step=6)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed) as caught:
        run(train, 1)
    assert (caught.value.step, caught.value.phase) == (7, "after step 7")
    if caught.value.memory["host_available"] < 0.2 * caught.value.memory["host_total"]:
        pytest.skip("this host is short of memory")
    why = "probably out of memory, unless someone killed it"
    looked = seconds > 0 or caught.value.memory["peak"]
    if looked and "oom_kills" in caught.value.memory:  # where groups are seen
        why = "from outside, not for want of memory"
    assert re.search(
        rf"was killed by SIGKILL \(after step 7\): {why} \(peak ([\d.]+ MB|unknown); "
        r".*the host had [\d.]+ [GM]B of [\d.]+ [GM]B available\)",
        str(caught.value),
    ), str(caught.value)


def test_a_crash_shows_where_python_was() -> None:
    def train() -> None:
        import ctypes

        def deep() -> None:
            ctypes.string_at(0)

        deep()

    with pytest.raises(RankFailed, match="was killed by SIGSEGV") as caught:
        run(train, 1)
    assert any("Segmentation fault" in line for line in caught.value.log)
    assert any(re.search(r"test_stall\.py\", line \d+ in deep", line) for line in caught.value.log)


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda: os._exit(3), r"left with exit code 3 before its function returned"),
        (lambda: os._exit(0), r"left with exit code 0 before its function returned"),
        (lambda: exit_by(), r"called sys\.exit\(None\) instead of returning"),
        (lambda: exit_by(0), r"called sys\.exit\(0\) instead of returning"),
    ],
)
def test_leaving_before_the_function_returned_is_an_error(leave: Callable[[], None], said: str) -> None:
    with pytest.raises(RankFailed, match=said):
        run(leave, 1)


def exit_by(code: int | None = None) -> None:
    import sys

    sys.exit(code)
