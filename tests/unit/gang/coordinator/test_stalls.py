"""The detection of stalls: which ranks stall, which is the cause, and when none does; and a rank's progress page."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from clusters import wait
from tritium.errors import RankFailed, Stalled
from tritium.events import Logged
from tritium.gang.coordinator.members import Member
from tritium.gang.coordinator.stall_watch import StallWatch
from tritium.gang.coordinator.stalls import Answer, RankStatus, at_fault, describe_stall, judge, starved
from tritium.gang.failure import Failure
from tritium.gang.killed import from_outside, killed_for
from tritium.gang.rank.progress_page import ProgressPage, ProgressWriter
from tritium.gang.settings import Gang
from tritium.gang.stall_limit import StallLimit
from tritium.gang.supervisor import process_stats
from tritium.gang.supervisor.monitor import _Logs
from tritium.gang.supervisor.process_stats import Busy, Lapse, Still
from tritium.gang.supervisor.stacks import Frame, in_collective, main_thread, where
from tritium.wire import Message

LIMIT = StallLimit(600.0)


def status(rank: int, **facts: Any) -> RankStatus:
    facts = {"quiet": 601.0, "idle": 601.0, "step_limit": 0.0 if facts.get("step") else None, **facts}
    return RankStatus(rank=rank, host=f"h{rank}", heard=1000.0, **facts)


def stuck(*ranks: RankStatus) -> list[int]:
    return [each.rank for each in judge(ranks, LIMIT, 1000.0).still]


class TestWhoStandsStill:
    def test_a_rank_that_reported_a_step_and_made_no_progress(self) -> None:
        assert stuck(status(0, step=3, idle=0.0)) == [0]
        assert stuck(status(0, step=3, quiet=599.0)) == []

    def test_one_that_only_logs_its_steps_by_its_own_intervals(self) -> None:
        assert stuck(status(0, step=3, step_limit=None, idle=0.0)) == []
        assert stuck(status(0, step=3, step_limit=900.0, idle=0.0)) == []
        assert stuck(status(0, step=3, step_limit=900.0, idle=0.0, quiet=901.0)) == [0]
        logs = _Logs(0.0)
        assert [logs.look(1, 20.0), logs.look(2, 25.0), logs.look(3, 26.0), logs.look(3, 99.0)] == [
            None,
            None,
            200,
            200,
        ]

    def test_what_was_heard_long_ago_counts_from_then(self) -> None:
        assert [s.rank for s in judge([status(0, step=3, quiet=1.0)], LIMIT, 1600.0).still] == [0]

    def test_a_rank_without_steps_only_when_it_is_idle_and_no_other_rank_moves(self) -> None:
        assert stuck(status(0, idle=3.0)) == []
        assert stuck(status(0), status(1)) == [0, 1]
        assert stuck(status(0), status(1, idle=3.0)) == []
        assert stuck(status(0), status(1, idle=3.0, finished=True)) == [0]

    def test_not_a_rank_that_waits_for_others_or_has_returned(self) -> None:
        assert stuck(status(0, doing="wait", step=3), status(1, finished=True), status(2, doing="rows")) == []
        assert stuck(status(0, doing="wait"), status(1)) == [1]

    def test_a_stopped_process_wherever_it_is(self) -> None:
        assert stuck(status(0, doing="wait", state="T"), status(1, quiet=0.0)) == [0]

    def test_not_a_rank_that_has_returned_and_does_not_leave(self) -> None:
        """Its supervisor limits that: the results are there."""
        assert stuck(status(0, finished=True, phase="leaving"), status(1, finished=True, phase="returned")) == []


def test_the_limit_is_that_of_the_settings() -> None:
    assert StallLimit.of(Gang()) == StallLimit(600.0)
    assert StallLimit.of(Gang(stall_timeout=30, on_stall="report")) == StallLimit(30, end=False)


class TestWhoIsAtFault:
    def first(self, *ranks: RankStatus, collective: tuple[int, ...] = ()) -> int:
        answers = {
            each.rank: Answer("…", "in f() at f.py:1", "all_reduce" if each.rank in collective else "")
            for each in ranks
        }
        return at_fault(ranks, judge(ranks, LIMIT, 1000.0).still, answers)[0].rank

    def test_the_stopped_process(self) -> None:
        assert self.first(status(0, step=1, taken=1), status(1, step=2, taken=2, state="T")) == 1

    def test_the_lowest_step(self) -> None:
        assert self.first(status(0, step=310, taken=310), status(1, step=309, taken=309)) == 1
        assert self.first(status(0, step=4), status(1, step=3)) == 1
        assert self.first(status(0, epoch=2, step=1), status(1, epoch=1, step=3)) == 1

    def test_the_one_outside_of_a_collective_that_the_others_are_in(self) -> None:
        assert self.first(status(0, step=5, taken=5), status(1, step=5, taken=5), collective=(0,)) == 1
        assert self.first(status(0), status(1, finished=True, phase="returned"), collective=(0,)) == 1

    def test_not_one_that_merely_has_returned(self) -> None:
        assert self.first(status(0, step=5), status(1, step=5, finished=True)) == 0

        assert self.first(status(0, step=5, taken=5), status(1, step=2, taken=2, finished=True)) == 0
        assert self.first(status(0, step=5, taken=5), status(1, step=2, taken=2, finished=True), collective=(0,)) == 1

    def test_not_one_that_moves(self) -> None:
        assert self.first(status(0, step=5, taken=5), status(1, step=2, taken=2, quiet=0.0)) == 0

    def test_the_story_names_it_first_and_says_what_it_never_reached(self) -> None:
        ranks = [status(0, step=310, taken=310, phase="step 310"), status(1, step=309, taken=309, phase="step 309")]
        answers = {
            0: Answer("…", "in train() at t.py:42 → all_reduce (d.py:1)", "all_reduce"),
            1: Answer(why="its process is stopped"),
        }
        order = at_fault(ranks, ranks, answers)
        text = describe_stall(order[0], order, [], answers, 1000.0)
        assert text.splitlines() == [
            "rank 1 on h1 hangs: step 309, no progress for 601.0 s. It never reached the all_reduce in which "
            "rank 0 waits (step 310).",
            "",
            "Where the ranks are:",
            "  rank 1 (host h1): step 309, its process is stopped",
            "  rank 0 (host h0): step 310, in train() at t.py:42 → all_reduce (d.py:1)",
        ]


class TestTelling:
    """What the coordinator does with it, without a network."""

    waits: ClassVar[dict[str, Any]] = {"step": 9, "taken": 9, "doing": "step", "phase": "step 9"}

    def conclude(self, ranks: list[RankStatus], collective: tuple[int, ...], watch: StallWatch | None = None) -> Any:
        watch = watch or StallWatch(LIMIT, len(ranks))
        members = [Member(s.rank, 0, s.host, "", 0, 1, rank=s.rank, status=s, finished=s.finished) for s in ranks]
        assert watch.look(members, 1000.0)
        number = watch.ask()
        assert not watch.look(members, 1000.0)  # one question at a time
        for s in ranks:
            fields = {"where": "", "collective": "all_reduce" if s.rank in collective else "", "why": ""}
            assert watch.take(number, s.rank, Message("stacks", fields, b"s")) == (s is ranks[-1])
        found = watch.conclude(number, members, 1000.0)
        assert not watch.look(members, 1000.0)  # it is told once
        return found

    def test_ranks_that_wait_in_an_exchange_for_one_that_moves_are_left_alone(self) -> None:
        saves = status(0, step=9, phase="saving a checkpoint", quiet=3.0)
        assert self.conclude([saves, status(1, **self.waits)], collective=(1,)) is None

    def test_but_not_one_that_stands_still_elsewhere(self) -> None:
        failure = self.conclude([status(0, step=9, quiet=3.0), status(1, **self.waits)], collective=())
        assert failure.rank == 1

    def test_the_same_stall_is_told_again_when_everything_moved_in_between(self) -> None:
        watch = StallWatch(StallLimit(600.0, end=False), 1)
        for _ in range(2):
            failure = self.conclude([status(0, step=3)], (), watch)
            assert failure.rank == 0
            assert not watch.look(
                [Member(0, 0, "a", "", 0, 1, rank=0, status=RankStatus(heard=1000.0, step=4, step_limit=0.0))], 1000.0
            )


class TestRows:
    def test_none_for_the_limit_while_ranks_wait_for_them(self) -> None:
        hungry = {"doing": "rows", "receiving": True, "rows_quiet": 601.0}
        ranks = [status(0, **hungry, rows={"train": 9}), status(1, **hungry, rows={"train": 3})]
        found = starved(ranks, LIMIT, 1000.0)
        assert found is not None
        assert found.rank == 1

    def test_rows_for_any_rank_are_enough(self) -> None:
        hungry = {"doing": "rows", "receiving": True}
        assert (
            starved([status(0, **hungry, rows_quiet=601.0), status(1, **hungry, rows_quiet=3.0)], LIMIT, 1000) is None
        )

    def test_none_waits(self) -> None:
        assert starved([status(0, receiving=True, rows_quiet=601.0)], LIMIT, 1000.0) is None
        assert starved([status(0, receiving=True, rows_quiet=601.0, finished=True)], LIMIT, 1000.0) is not None


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    page = ProgressPage()
    yield page
    page.close()


class TestProgressPage:
    def test_is_read_from_another_process_even_when_that_one_is_stopped(self, page: ProgressPage) -> None:
        assert page.read()["changes"] == 0
        code = (
            "import os, signal, sys; from tritium.gang.rank.progress_page import ProgressWriter\n"
            "progress = ProgressWriter.on(int(sys.argv[1])); progress.took('train', 0, 309)\n"
            "os.kill(os.getpid(), signal.SIGSTOP)"
        )
        child = subprocess.Popen([sys.executable, "-c", code, str(page.fd)], pass_fds=[page.fd])
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        word = page.read()
        child.kill()
        child.wait()
        assert (word["step"], word["phase"], word["taken"], word["doing"]) == (310, "step 310", 1, "step")

    def test_steps_phases_and_what_lies_within_them(self, page: ProgressPage) -> None:
        progress = ProgressWriter.on(page.fd)
        assert page.read()["phase"] == "starting"
        progress.enter("importing torch")
        assert page.read()["phase"] == "importing torch"
        progress.took("train", 1, 9)
        with progress.within("in gather", "wait"), progress.within("saving a checkpoint"):
            assert (page.read()["phase"], page.read()["step"]) == ("saving a checkpoint", 10)
        assert page.read()["phase"] == "epoch 2, step 10"
        progress.took("validation", 0, 4)
        assert (page.read()["phase"], page.read()["step"]) == ("step 5 of 'validation'", 10)
        progress.on_logged(Logged(rank=0, step=99))  # only shown where no batches are taken
        assert (page.read()["step"], page.read()["taken"]) == (10, 2)
        assert page.read()["main"] == threading.main_thread().ident

    def test_logged_steps_are_shown_of_a_rank_that_takes_no_batches(self, page: ProgressPage) -> None:
        progress = ProgressWriter.on(page.fd)
        progress.on_logged(Logged(rank=0, step=3, epoch=1))
        assert (page.read()["step"], page.read()["epoch"], page.read()["phase"]) == (4, 2, "after epoch 2, step 4")

    def test_everything_is_a_change(self, page: ProgressPage) -> None:
        progress, seen = ProgressWriter.on(page.fd), []
        for act in (
            progress.touch,
            lambda: progress.on_logged(Logged(rank=0)),
            lambda: progress.took("a", 0, 0),
            lambda: progress.enter("b"),
        ):
            act()
            seen.append(page.read()["changes"])
        assert seen == [2, 3, 4, 5]

    def test_a_long_phase_is_cut(self, page: ProgressPage) -> None:
        ProgressWriter.on(page.fd).enter("é" * 500)
        assert page.read()["phase"].startswith("é" * 80)


DUMP = """Thread 0x00000000000000aa (most recent call first):
  File "/x/a.py", line 1 in other

Current thread 0x00000000000000bb (most recent call first):
  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/lib/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/x/train.py", line 42 in train
  File "<string>", line 6 in <module>
"""


class TestStacks:
    def test_the_main_thread_in_one_line(self) -> None:
        frames = main_thread(DUMP, 0xBB)
        assert where(frames) == "in train() at train.py:42 → all_reduce (distributed_c10d.py:3252)"
        assert in_collective(frames) == "all_reduce"
        assert where(main_thread(DUMP, 0xAA)) == "in other() at a.py:1"
        assert not in_collective(main_thread(DUMP, 0xAA))
        assert main_thread(DUMP, None) == frames

    def test_nothing_was_written(self) -> None:
        assert main_thread("", 1) == []
        assert where([]) == ""

    def test_the_standard_library_is_not_the_users(self) -> None:
        frames = [Frame(threading.__file__, "327", "wait"), Frame("/x/t.py", "3", "go")]
        assert where(frames) == "in go() at t.py:3 → wait (threading.py:327)"


class TestVitals:
    def test_a_process_that_works_and_one_that_sleeps(self) -> None:
        now = 0.0
        busy = Busy(os.getpid(), now)
        busy.look(now)
        assert busy.look(30.0) == 30.0
        while sum(os.times()[:2]) < 1e9:  # a little work
            if busy.look(1.0) == 0.0:
                break
        assert busy.look(2.0) == 1.0

    def test_with_and_without_what_a_process_started(self) -> None:
        code = "import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(60)"
        before = process_stats.cpu_seconds(os.getpid(), whole=False) or 0.0
        child = subprocess.Popen([sys.executable, "-c", code])
        try:
            wait(lambda: (process_stats.cpu_seconds(child.pid) or 0.0) > 0.3, "it has worked", 30)
            whole, own = (
                process_stats.cpu_seconds(os.getpid()) or 0.0,
                process_stats.cpu_seconds(os.getpid(), whole=False) or 0.0,
            )
        finally:
            child.kill()
            child.wait()
        assert whole > own + 0.25
        assert own >= before
        assert process_stats.cpu_seconds(1 << 22) is None

    def test_a_number_that_stays(self) -> None:
        number = Still(0.0)
        assert [number.look(1, 5.0), number.look(1, 7.0), number.look(2, 8.0)] == [0.0, 2.0, 0.0]

    def test_time_in_which_this_process_did_not_run_is_forgiven(self) -> None:
        lapse = Lapse(0.0)
        assert [lapse.look(1.0), lapse.look(301.0), lapse.look(302.0)] == [0.0, 300.0, 0.0]


class TestWords:
    def test_out_of_memory_as_far_as_it_is_known(self) -> None:
        gb = 1 << 30
        host = {"host_total": 16 * gb, "host_available": 300 << 20, "peak": gb * 12 // 10}
        assert killed_for(host) == (
            "probably out of memory, unless someone killed it (peak 1.2 GB; the host had 300 MB of 16 GB available)"
        )
        assert killed_for({**host, "group_limit": gb // 2, "oom_kills": 1}) == (
            "out of memory (its cgroup's limit of 512 MB was reached: oom_kill 1; peak 1.2 GB)"
        )
        assert killed_for({}) == "probably out of memory, unless someone killed it"

    def test_figures_that_speak_against_it(self) -> None:
        mb = 1 << 20
        group = {"group": "/g", "group_limit": None, "group_peak": 900 * mb, "oom_kills": 0}
        figures = {"host_total": 16_000 * mb, "host_available": 9_000 * mb, "peak": 700 * mb, **group}
        assert killed_for(figures) == (
            "from outside, not for want of memory (peak 700 MB; the host had 8.8 GB of 15.6 GB available)"
        )
        for change in (
            {"peak": None},  # nothing is known of it
            {"peak": 8_000 * mb},  # it could have taken all that was there, between two looks
            {"host_available": 1_500 * mb},  # what other processes left
            {"host_total": None},  # not Linux
            {"oom_kills": 1},
            {"group_limit": 900 * mb},  # what the whole container may use, used up
            {"group_limit": 1_000 * mb, "group_peak": None},
        ):
            assert not from_outside({**figures, **change}), change
        assert not from_outside({key: value for key, value in figures.items() if key != "oom_kills"})
        assert from_outside({**figures, "group_limit": 1_000 * mb})

    def test_the_error(self) -> None:
        at = {"step": 309, "phase": "step 309", "seconds": 3.1}
        failure = Failure(how="stalled", rank=2, host="b", text="rank 2 …\n\nmore", at=at, stacks={2: "stack"})
        error = Failure.read(failure.fields(), b"").error("/runs/1")
        assert isinstance(error, Stalled)
        assert isinstance(error, RankFailed)
        assert (error.rank, error.host, error.step, error.seconds) == (2, "b", 309, 3.1)
        assert "/runs/1/stacks" in str(error)
        assert failure.error().stacks == {2: "stack"}
        assert "stacks" not in failure.fields()
