"""The display of a run: plain lines where there is no terminal, a live display where there is one."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from tritium.events import (
    GangFailed,
    GangFormed,
    GangRetried,
    GangStarted,
    Logged,
    Note,
    RankEnded,
    RankReported,
    RowsCounted,
    RunEnded,
    Waiting,
)
from tritium.observe.position import TrainingPosition, clock_time, number, sparkline
from tritium.observe.progress import LINE_SECONDS, Progress

PEERS = [{"rank": 0, "host": "b7"}, {"rank": 1, "host": "b9"}]


ANOTHER_ATTEMPT = {
    "retry": GangRetried(number=1, of=2, start=None, reason="rank 1 was lost"),
    "started": GangStarted(ranks=2),
}


class Clock:
    """A clock that the test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def progress(stream: io.StringIO, clock: Clock) -> Any:
    progress = Progress(2, stream=stream, clock=clock)
    yield progress
    progress.close()


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


BESIDE_A_BAR = """
import sys, time

from tritium.events import GangStarted, Note
from tritium.observe.progress import Progress

progress = Progress(2, live=False)
progress.event(GangStarted(ranks=2, bar=True))
time.sleep(0.3)  # Spark draws its bar five times a second
sys.stderr.write("\\r[Stage 0:>   (0 + 2) / 2]")
sys.stderr.flush()
progress.event(Note(text="first"))
progress.event(Note(text="second"))
"""


class TestPlainLines:
    def test_what_a_gang_waits_for(self, progress: Progress, stream: io.StringIO) -> None:
        progress.event(Waiting(text="no rank has reported yet"))
        assert lines(stream) == ["tritium: no rank has reported yet"]

    @pytest.mark.parametrize("together", [True, False])
    def test_sparks_progress_bar_is_wiped_where_it_has_the_line(self, together: bool) -> None:
        stderr = subprocess.STDOUT if together else subprocess.PIPE
        command = [sys.executable, "-c", BESIDE_A_BAR]
        shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, check=True).stdout.decode()
        bar = "\r[Stage 0:>   (0 + 2) / 2]\r" + " " * 80 + "\r" if together else ""
        assert shown == f"tritium: starting 2 ranks\n{bar}tritium: first\ntritium: second\n"

    def test_a_retry_spools_its_own_rows(self, progress: Progress, stream: io.StringIO) -> None:
        for rank in (0, 1):
            progress.event(RowsCounted(name="train", rank=rank, rows=100, ended=True))
        progress.event(GangRetried(number=1, of=2, start=None, reason="rank 1 was killed"))
        progress.event(RowsCounted(name="train", rank=0, rows=100, ended=True))
        assert lines(stream) == ["tritium: spooled 200 rows of 'train' after 0.0 s"]
        progress.event(RowsCounted(name="train", rank=1, rows=100, ended=True))
        assert lines(stream) == 2 * ["tritium: spooled 200 rows of 'train' after 0.0 s"]

    def test_a_retry_has_a_position_and_a_speed_of_its_own(
        self, progress: Progress, stream: io.StringIO, clock: Clock
    ) -> None:
        for step in (0, 1):
            for rank in (0, 1):
                progress.event(Logged(rank=rank, step=step, steps=9, rows=1000 * (step + 1), values={"loss": 1.0}))
            clock.now += 1
        progress.event(GangRetried(number=1, of=2, start=None, reason="rank 0 was killed"))
        clock.now += LINE_SECONDS
        progress.event(Logged(rank=1, step=0, rows=10, values={"accuracy": 0.5}))  # one rank is left
        clock.now += LINE_SECONDS
        progress.event(Logged(rank=1, step=1, rows=60, values={"accuracy": 0.5}))
        assert lines(stream) == [
            "tritium: step 1/9, loss 1",
            "tritium: step 1, accuracy 0.5",
            "tritium: step 2, 10 rows/s, accuracy 0.5",
        ]

    @pytest.mark.parametrize("show", [True, False])
    @pytest.mark.parametrize("kind", ["retry", "started"])
    def test_a_line_that_a_killed_rank_left_unfinished_is_one_of_its_own(
        self, kind: str, show: bool, stream: io.StringIO
    ) -> None:
        progress = Progress(2, show=show, stream=stream)
        progress.output(1, "half a li")
        progress.event(ANOTHER_ATTEMPT[kind])
        progress.output(1, "the next attempt\n")
        progress.close()
        told = [line for line in lines(stream) if line.startswith("[")]
        assert told == ["[rank 1] half a li", "[rank 1] the next attempt"]

    def test_an_attempt_with_fewer_ranks_says_so(self, progress: Progress, stream: io.StringIO) -> None:
        progress.event(GangStarted(ranks=1, slots=1))
        progress.event(GangFormed(peers=PEERS[:1]))
        progress.event(RowsCounted(name="train", rank=0, rows=100, ended=True))
        assert lines(stream) == [
            "tritium: starting 1 rank on 1 slot",
            "tritium: 1 rank on b7 after 0.0 s",
            "tritium: spooled 100 rows of 'train' after 0.0 s",
        ]

    def test_the_kinds_of_gpus_are_said(self, progress: Progress, stream: io.StringIO) -> None:
        kinds = [{"address": "0", "name": "NVIDIA H100"}, {"address": "1", "name": "NVIDIA A100"}, {"address": "2"}]
        peers = [{**PEERS[0], "devices": kinds[:1]}, {**PEERS[0], "rank": 1, "devices": kinds}]
        progress.event(GangFormed(peers=peers))
        assert lines(stream) == ["tritium: 2 ranks on b7 with 2 x NVIDIA H100, 1 x NVIDIA A100 after 0.0 s"]

    def test_a_run_from_start_to_end(self, progress: Progress, stream: io.StringIO, clock: Clock) -> None:
        progress.event(GangStarted(ranks=2, slots=4))
        progress.event(RankReported(partition=0, host="b7", pid=1))
        clock.now += 3
        progress.event(GangFormed(peers=PEERS))
        for rank in (0, 1):
            progress.event(RowsCounted(name="train", rank=rank, rows=6_150, ended=True))
        for step in range(10):
            clock.now += 1
            for rank in (0, 1):
                position = {"step": step, "steps": 10, "epoch": 0, "epochs": 2, "rows": 100 * (step + 1)}
                progress.event(Logged(rank=rank, **position, values={"loss": 1 / (step + 1)}))
        progress.event(RankEnded(rank=0))
        progress.event(RunEnded(ok=True, seconds=13.2))
        assert lines(stream) == [
            "tritium: starting 2 ranks on 4 slots",
            "tritium: 2 ranks on b7, b9 after 3.0 s",
            "tritium: spooled 12,300 rows of 'train' after 3.0 s",
            "tritium: epoch 1/2, step 1/10, loss 1",
            "tritium: epoch 1/2, step 6/10, 200 rows/s, loss 0.1667, 0:14 left",
            "tritium: epoch 1/2, step 10/10, 200 rows/s, loss 0.1, 0:10 left",
            "tritium: done after 13.2 s",
        ]

    def test_rows_while_exchanging_come_no_more_often(
        self, progress: Progress, stream: io.StringIO, clock: Clock
    ) -> None:
        for second in range(11):
            for name in ("train", "validation"):
                progress.event(RowsCounted(name=name, rank=0, rows=second * 100, ended=False))
            clock.now += 1
        assert lines(stream) == [
            "tritium: spooled 500 rows of 'train', 400 rows of 'validation'",
            "tritium: spooled 1,000 rows of 'train', 900 rows of 'validation'",
        ]

    def test_what_was_held_back_is_said_at_the_end(self, progress: Progress, stream: io.StringIO) -> None:
        progress.event(Logged(rank=0, step=0, values={"loss": 2.0}))
        progress.event(Logged(rank=0, step=1, values={"loss": 1.0}))
        progress.close()
        progress.close()
        assert lines(stream) == ["tritium: step 1, loss 2", "tritium: step 2, loss 1"]

    def test_failures_and_notes(self, progress: Progress, stream: io.StringIO) -> None:
        progress.event(Note(text="waiting for slots: 2 needed"))
        progress.event(GangFailed(rank=1, host="b9", type="ValueError", text="a\nb", how="exception", pid=3))
        progress.event(GangFailed(rank=1, host="b9", how="signal", type="", text="", signal="SIGKILL"))
        progress.event(GangFailed(rank=1, host="b9", type="", text="", how="exit", exit_code=3))
        progress.event(RunEnded(ok=False, seconds=2.0))
        assert lines(stream) == [
            "tritium: waiting for slots: 2 needed",
            "tritium: rank 1 on b9 failed: ValueError: a",
            "tritium: rank 1 on b9 was killed by SIGKILL",
            "tritium: rank 1 on b9 left with exit code 3",
            "tritium: ended without a result after 2.0 s",
        ]


class TestOutput:
    def test_whole_lines_with_the_rank_in_front(self, progress: Progress, stream: io.StringIO) -> None:
        progress.output(0, "one\ntw")
        progress.output(1, "[red]other[/red]\n")
        progress.output(0, "o\nthree")
        assert lines(stream) == ["[rank 0] one", "[rank 1] [red]other[/red]", "[rank 0] two"]
        progress.close()
        assert lines(stream)[-1] == "[rank 0] three"

    def test_a_bar_drawn_again_and_again_is_its_last_state(self, progress: Progress, stream: io.StringIO) -> None:
        for percent in range(0, 101, 20):
            progress.output(0, f"\r{percent}%")
        progress.output(0, "\r\nnext\r\n")
        assert lines(stream) == ["[rank 0] 100%", "[rank 0] next"]

    def test_a_line_without_end_does_not_grow_for_ever(self, progress: Progress, stream: io.StringIO) -> None:
        for _ in range(100):
            progress.output(0, "\r" + "#" * 1000)
        progress.output(1, "x" * 40_000)
        assert [len(line) for line in lines(stream)] == [40_009]

    @pytest.mark.parametrize(("output", "shown"), [("all", [0, 1]), ("rank 0", [0]), ("none", [])])
    def test_whose_output_is_shown(self, stream: io.StringIO, output: Any, shown: list[int]) -> None:
        progress = Progress(2, output=output, stream=stream)
        for rank in (0, 1):
            progress.output(rank, "hello\n")
        progress.close()
        assert lines(stream) == [f"[rank {rank}] hello" for rank in shown]

    def test_without_progress_only_the_output_is_shown(self, stream: io.StringIO) -> None:
        progress = Progress(1, show=False, stream=stream)
        progress.event(RunEnded(ok=True, seconds=1.0))
        progress.output(0, "hello\n")
        progress.close()
        assert lines(stream) == ["[rank 0] hello"]

    def test_a_stream_that_knows_few_letters(self) -> None:
        narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
        progress = Progress(1, stream=narrow)
        progress.output(0, "Zürich ━\n")
        progress.close()
        assert narrow.buffer.getvalue() == b"[rank 0] Z\\xfcrich \\u2501\n"  # type: ignore[attr-defined]

    def test_a_terminal_that_has_gone_does_not_end_the_run(self, stream: io.StringIO) -> None:
        progress = Progress(1, stream=stream)
        stream.close()
        progress.output(0, "hello\n")
        progress.event(RunEnded(ok=True, seconds=1.0))
        progress.close()

    def test_from_many_threads_lines_stay_whole(self, progress: Progress, stream: io.StringIO) -> None:
        def print_lines(rank: int) -> None:
            for i in range(200):
                progress.output(rank, f"line {i}\n")
                progress.event(Logged(rank=rank, rows=i))

        threads = [threading.Thread(target=print_lines, args=(rank,)) for rank in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(8):
            assert [line for line in lines(stream) if line.startswith(f"[rank {rank}]")] == [
                f"[rank {rank}] line {i}" for i in range(200)
            ]


class TestTrainingPosition:
    def test_rows_of_all_ranks_a_second(self, clock: Clock) -> None:
        position = TrainingPosition(clock)
        assert position.rows_per_second is None
        for second in range(60):
            clock.now = second
            for rank in range(3):
                position.log(Logged(rank=rank, rows=50 * (second + 1) if second >= 30 else 0))
        assert position.rows_per_second == pytest.approx(150, rel=0.05)

    def test_time_left_by_steps_alone(self, clock: Clock) -> None:
        position = TrainingPosition(clock)
        position.log(Logged(rank=0, step=0, steps=100))
        assert position.seconds_left is None
        clock.now += 9
        position.log(Logged(rank=0, step=9, steps=100))
        assert position.fraction == pytest.approx(0.1)
        assert position.seconds_left == pytest.approx(90)
        clock.now += 10
        assert position.seconds_left == pytest.approx(80)  # it runs down between two logs
        position.log(Logged(rank=0, step=9, steps=100, values={"loss": 0.5}))
        assert position.seconds_left == pytest.approx(80)  # and on, when a step logs twice

    def test_the_course_of_the_loss(self, clock: Clock) -> None:
        position = TrainingPosition(clock)
        for step in range(10_000):
            position.log(
                Logged(rank=0, step=step, values={"lr": 9.0, "train_loss": 1.0 - step / 10_000, "loss_b": 5.0})
            )
            position.log(Logged(rank=1, step=step, values={"train_loss": 77.0}))
        position.log(Logged(rank=0, step=10_000, values={"train_loss": "NaN"}))
        assert len(position.losses) < 500
        assert position.losses == sorted(position.losses, reverse=True)
        bars = sparkline(position.losses)
        assert bars == "".join(sorted(bars, reverse=True))
        assert (len(bars), bars[0], bars[-1]) == (20, "█", "▁")
        assert sparkline([3.0, 3.0, 3.0]) == "▁▁▁"
        assert sparkline([1.0]) == ""

    def test_values_of_the_lowest_rank_that_logs(self, clock: Clock) -> None:
        position = TrainingPosition(clock)
        position.log(Logged(rank=2, values={"loss": 3.0, "accuracy": 0.5}))
        position.log(Logged(rank=1, values={"loss": 2.0}))
        position.log(Logged(rank=2, values={"loss": 9.0}))
        assert position.text() == "loss 2, accuracy 0.5"

    def test_an_unknown_number_of_steps(self, clock: Clock) -> None:
        position = TrainingPosition(clock)
        position.log(Logged(rank=0, epoch=1, epochs=4, step=7))
        assert position.text() == "epoch 2/4, step 8"
        assert position.fraction == pytest.approx(0.25)

    def test_numbers_and_times(self) -> None:
        assert [number(v) for v in (0.123456, 12345.678, 1e-9, float("nan"), "NaN")] == [
            "0.1235",
            "1.235e+04",
            "1e-09",
            "nan",
            "NaN",
        ]
        assert [clock_time(s) for s in (0.2, 59.6, 75, 3675)] == ["0:00", "1:00", "1:15", "1:01:15"]


class TestLive:
    def test_the_display_stays_below_the_output(self, stream: io.StringIO) -> None:
        threads = threading.active_count()
        progress = Progress(2, live=True, stream=stream)
        assert threading.active_count() == threads + 1
        progress.event(GangFormed(peers=PEERS))
        progress.output(0, "hello [red]\n")
        progress.event(Logged(rank=0, step=4, steps=10, epoch=0, epochs=2, values={"loss": 0.5}))
        progress.event(RunEnded(ok=True, seconds=1.0))
        progress.close()
        assert threading.active_count() == threads
        text = stream.getvalue()
        assert "[rank 0] hello [red]\n" in text
        *_, last = text.split("\x1b[2K")
        assert "done after 1.0 s" in last
        assert "epoch 1/2, step 5/10, loss 0.5" in last
        assert last.endswith("\x1b[?25h")  # the cursor is shown again

    def test_a_second_run_at_the_same_time_writes_plain_lines(self, stream: io.StringIO) -> None:
        other = io.StringIO()
        first = Progress(1, live=True, stream=stream)
        second = Progress(1, live=True, stream=other)
        second.event(GangFormed(peers=PEERS[:1]))
        second.close()
        first.close()
        assert other.getvalue().startswith("tritium: 1 rank on b7 after 0.")
        third = Progress(1, live=True, stream=other)  # the terminal was given back
        third.close()
        assert "\x1b[" in other.getvalue()

    def test_on_a_real_terminal(self) -> None:
        """A terminal is found by itself; prints of the driver's own stay above the display."""
        program = """
            from tritium.events import Logged
            from tritium.observe.progress import Progress
            progress = Progress(1)
            progress.event(Logged(rank=0, step=1, steps=4, values={"loss": 0.25}))
            print("from the driver")
            progress.output(0, "from the rank\\n")
            progress.close()
            print("afterwards")
        """
        ours, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        command = [sys.executable, "-c", textwrap.dedent(program)]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        text = b""
        try:
            while data := os.read(ours, 4096):
                text += data
        except OSError:  # Linux's word for the end of a terminal
            pass
        os.close(ours)
        assert process.wait(30) == 0
        shown = text.decode()
        assert shown.index("from the driver") < shown.index("[rank 0] from the rank") < shown.rindex("step 2/4")
        assert shown.rindex("step 2/4") < shown.index("afterwards")
        assert "\x1b[?25l" in shown

    @pytest.mark.parametrize("when", ["before", "meanwhile"])
    def test_a_real_terminal_that_has_gone_is_given_back(self, when: str, stream: io.StringIO) -> None:
        ours, theirs = pty.openpty()
        terminal, before = os.fdopen(theirs, "w"), (sys.stdout, sys.stderr)
        if when == "before":
            os.close(ours)
        progress = Progress(1, live=True, stream=terminal)
        if when == "meanwhile":
            os.close(ours)
        progress.output(0, "hello\n")
        progress.event(RunEnded(ok=True, seconds=1.0))
        progress.close()
        with contextlib.suppress(OSError):  # what it could not write
            terminal.close()
        assert (sys.stdout, sys.stderr) == before
        Progress(1, live=True, stream=stream).close()
        assert "\x1b[" in stream.getvalue()

    def test_in_a_notebook_without_widgets_lines_are_plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import rich.console

        monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
        stream = io.StringIO()
        progress = Progress(1, stream=stream)
        progress.event(GangFormed(peers=PEERS[:1]))
        progress.close()
        assert lines(stream)[0].startswith("tritium: 1 rank on b7")


def test_lines_are_a_few_seconds_apart() -> None:
    assert 1 <= LINE_SECONDS <= 10
