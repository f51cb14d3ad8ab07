"""`submit`, its handle, and those who listen: in process and with processes of this machine."""

from __future__ import annotations

import contextlib
import decimal
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import psutil
import pytest

import tritium as tr
from tritium.errors import BadSetting, RankFailed, RunCancelled, TritiumWarning
from tritium.events import CheckpointSaved, Event, GangFormed, Logged, Note, Printed, RunEnded, RunOpened, read
from tritium.gang.driver import launcher, run
from tritium.observe import stored, stream
from tritium.observe.run_directory import RunLog
from tritium.observe.stream import EventStream

PLACES = ("here", pytest.param("driver", marks=pytest.mark.processes))
REFUSED = "OSError: the tracking server is gone"
QUIET: dict[str, Any] = {"progress": False, "output": "none"}


def until(folder: Path, name: str) -> None:
    """Wait until a rank has written this file."""
    deadline = time.monotonic() + 60
    while not (folder / name).exists():
        assert time.monotonic() < deadline, f"no {name} came"
        time.sleep(0.01)


def busy(folder: Path, name: str = "pid") -> Callable[[], None]:
    """Return a function that writes down its pid, and then works in Python until it is ended."""

    def train() -> None:
        (folder / f"{name}.part").write_text(str(os.getpid()))
        (folder / f"{name}.part").rename(folder / name)
        while True:
            time.sleep(0.01)

    return train


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def counted() -> int:
    world = tr.world()
    for step in range(3):
        world.log(step=step, loss=1 / (step + 1))
    print("hello")
    return world.rank


@pytest.mark.parametrize("on", PLACES)
class TestResult:
    def test_one_value_per_rank_and_a_handle_that_says_what_came_of_it(self, on: str, tmp_path: Path) -> None:
        handle = tr.submit(counted, on=on, run_dir=str(tmp_path / "run"), **QUIET)
        assert isinstance(handle, tr.Run)
        assert handle.result(60) == [0]
        assert handle.result() == [0]
        assert (handle.done, handle.status, handle.run_dir) == (True, "succeeded", str(tmp_path / "run"))
        assert handle.report["ok"] is True
        assert handle.report["run"] == handle.id
        assert handle.id in repr(handle)

    def test_an_error_is_that_of_launch(self, on: str) -> None:
        def train() -> None:
            raise ValueError("of the function")

        handle = tr.submit(train, on=on, **QUIET)
        for _ in range(2):
            with pytest.raises(ValueError if on == "here" else RankFailed, match="of the function") as caught:
                handle.result(60)
        assert handle.status == "failed"
        assert isinstance(caught.value if on == "here" else caught.value.__cause__, ValueError)

    def test_a_timeout_leaves_it_going(self, on: str, tmp_path: Path) -> None:
        def train() -> int:
            (tmp_path / "runs").touch()
            while not (tmp_path / "go").exists():
                time.sleep(0.01)
            return 7

        handle = tr.submit(train, on=on, **QUIET)
        until(tmp_path, "runs")
        with pytest.raises(TimeoutError, match=rf"Run {handle.id} has not ended within 0\.1 s, and goes on"):
            handle.result(timeout=0.1)
        assert (handle.done, handle.status) == (False, "running")
        (tmp_path / "go").touch()
        assert handle.result(60) == [7]

    def test_from_many_threads(self, on: str) -> None:
        handle, results = tr.submit(counted, on=on, **QUIET), []
        threads = [threading.Thread(target=lambda: results.append(handle.result(60))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [[0]] * 4

    def test_settings_are_refused_where_it_is_submitted(self, on: str) -> None:
        with pytest.raises(BadSetting, match="retries=-1"):
            tr.submit(counted, on=on, retries=-1)
        with pytest.raises(BadSetting, match="can't be called"):
            tr.submit(lambda x: x, on=on, **QUIET)

    def test_no_thread_is_left(self, on: str) -> None:
        before = set(threading.enumerate())
        tr.submit(counted, on=on, **QUIET).result(60)
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
        assert not {thread.name for thread in set(threading.enumerate()) - before}


@pytest.mark.parametrize("on", PLACES)
class TestCancel:
    def test_ends_the_function(self, on: str, tmp_path: Path) -> None:
        handle = tr.submit(busy(tmp_path), on=on, **QUIET)
        until(tmp_path, "pid")
        handle.cancel()
        with pytest.raises(RunCancelled, match=r"cancelled by Run\.cancel"):
            handle.result(30)
        assert handle.status == "cancelled"
        assert handle.report["ok"] is False
        assert handle.report["failure"]["type"].endswith("RunCancelled"), handle.report["failure"]
        if on == "driver":
            assert not alive(int((tmp_path / "pid").read_text()))
        handle.cancel()
        assert tr.launch(counted, on=on, **QUIET) == [0]

    def test_leaving_the_block_ends_it_too(self, on: str, tmp_path: Path) -> None:
        def leave() -> None:
            with handle:
                until(tmp_path, "pid")
                raise KeyError("of the block")

        handle = tr.submit(busy(tmp_path), on=on, **QUIET)
        with pytest.raises(KeyError):
            leave()
        assert (handle.done, handle.status) == (True, "cancelled")

    def test_of_a_run_that_has_ended_changes_nothing(self, on: str) -> None:
        with tr.submit(counted, on=on, **QUIET) as handle:
            assert handle.result(60) == [0]
        assert handle.status == "succeeded"
        assert handle.result() == [0]

    def test_before_it_has_begun(self, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
        begun = threading.Event()
        attempted = run.attempted

        def late(attempt: Any) -> list[Any]:
            begun.wait(30)
            return attempted(attempt)

        monkeypatch.setattr(run, "attempted", late)
        handle = tr.submit(counted, on=on, **QUIET)
        handle.cancel()
        begun.set()
        with pytest.raises(RunCancelled):
            handle.result(30)


def test_of_a_function_that_catches_exceptions(tmp_path: Path) -> None:
    """It is interrupted as by Ctrl-C, which `except Exception` lets through."""

    def train() -> None:
        try:
            while True:
                with contextlib.suppress(Exception):
                    (tmp_path / "runs").touch()
                    time.sleep(0.01)
        finally:
            (tmp_path / "cleaned").touch()

    with tr.submit(train, on="here", **QUIET):
        until(tmp_path, "runs")
    assert (tmp_path / "cleaned").exists()


def test_to_cancel_again_does_not_interrupt_what_the_function_cleans_up(tmp_path: Path) -> None:
    """The end of the block is a second request."""

    def train() -> None:
        try:
            (tmp_path / "runs").touch()
            while True:
                time.sleep(0.01)
        finally:
            (tmp_path / "cleaning").touch()
            while not (tmp_path / "go").exists():
                time.sleep(0.01)
            (tmp_path / "cleaned").touch()

    with tr.submit(train, on="here", **QUIET) as handle:
        until(tmp_path, "runs")
        handle.cancel()
        until(tmp_path, "cleaning")
        handle.cancel()
        (tmp_path / "go").touch()
    assert handle.status == "cancelled"
    assert (tmp_path / "cleaned").exists()


def test_one_that_waits_for_a_store_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(stored, "MESSAGE_SECONDS", 0.05)
    monkeypatch.setattr(stored, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(stored._Uploads, "_copy", lambda *_: (uploads.set(), go_on.wait(60)))
    handle = tr.submit(lambda: tr.world().store("a", b"x"), on="here", run_dir="memory://waits", **QUIET)
    assert uploads.wait(60)
    handle.cancel()
    try:
        with pytest.raises(RunCancelled):
            handle.result(30)
    finally:
        go_on.set()


def test_a_gang_of_one_in_this_process_is_called_by_the_thread_that_launches() -> None:
    """And one that is submitted by another thread, with the context variables of the first."""

    def where() -> tuple[int, int]:
        return threading.get_ident(), decimal.getcontext().prec

    with decimal.localcontext(decimal.Context(7)):
        assert tr.launch(where, on="here", **QUIET) == [(threading.get_ident(), 7)]
        ((thread, precision),) = tr.submit(where, on="here", **QUIET).result(60)
    assert (thread != threading.get_ident(), precision) == (True, 7)


@pytest.mark.processes
def test_two_at_once(tmp_path: Path) -> None:
    def meet(own: str, other: str) -> str:
        (tmp_path / own).touch()
        while not (tmp_path / other).exists():
            time.sleep(0.01)
        return own

    one, two = (tr.submit(meet, on="driver", args=names, **QUIET) for names in (("a", "b"), ("b", "a")))
    assert (one.result(60), two.result(60)) == (["a"], ["b"])
    assert one.id != two.id


def test_two_in_this_process_come_one_after_the_other(tmp_path: Path) -> None:
    """Their world and their environment are the process's."""

    def rank_of(own: str) -> list[str]:
        for _ in range(20):
            assert tr.world().run_id == os.environ["OWN"] or os.environ["OWN"] == own
            time.sleep(0.005)
        return [os.environ["OWN"]]

    runs = [tr.submit(rank_of, on="here", args=(name,), env={"OWN": name}, **QUIET) for name in "ab"]
    assert [one.result(60) for one in runs] == [[["a"]], [["b"]]]
    first = tr.submit(busy(tmp_path), on="here", **QUIET)
    until(tmp_path, "pid")
    second = tr.submit(counted, on="here", **QUIET)
    second.cancel()
    with pytest.raises(RunCancelled):
        second.result(30)
    first.cancel()
    with pytest.raises(RunCancelled):
        first.result(30)


class TestEvents:
    @pytest.mark.parametrize("on", PLACES)
    def test_are_those_of_the_file_and_what_ranks_print(self, on: str, tmp_path: Path) -> None:
        handle = tr.submit(counted, on=on, run_dir=str(tmp_path), **QUIET)
        live = list(handle.events())
        assert handle.done or handle.result(60) == [0]
        later = list(handle.events())
        assert live == later
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [json.loads(event.to_json()) for event in live if not isinstance(event, Printed)] == lines
        assert isinstance(live[0], RunOpened)
        assert isinstance(live[-1], RunEnded)
        assert {event.run for event in live} == {handle.id}
        assert [event.step for event in live if isinstance(event, Logged)] == [0, 1, 2]
        printed = "".join(event.text for event in live if isinstance(event, Printed))
        assert printed == ("hello\n" if on == "driver" else "")

    @pytest.mark.processes
    def test_come_while_it_runs(self, tmp_path: Path) -> None:
        with tr.submit(busy(tmp_path), on="driver", **QUIET) as handle:
            formed = next(event for event in handle.events() if isinstance(event, GangFormed))
            assert formed.peers[0]["rank"] == 0
            assert not handle.done

    def test_one_that_reads_too_slowly_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream, "KEPT_BYTES", 200)
        events = EventStream()
        for number in range(10):
            events.add(Note(text=f"{number}").to_json())
        events.close()
        missed, *kept = [event.text for event in events if isinstance(event, Note)]
        assert missed == f"{10 - len(kept)} events came faster than they were read. events.jsonl has them."
        assert kept == [str(number) for number in range(10 - len(kept), 10)]

    def test_end_when_the_end_of_the_run_can_not_be_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(self: Any, report: Any, page: str) -> None:
            raise OSError(REFUSED)

        monkeypatch.setattr(RunLog, "report", refused)
        handle = tr.submit(counted, on="here", **QUIET)
        assert isinstance(list(handle.events())[-1], RunEnded)
        with pytest.raises(OSError, match=REFUSED):
            handle.result(60)

    def test_an_url_with_a_key_in_quotation_marks_is_read_back(self) -> None:
        line = Printed(rank=0, text='GET "http://host/?token=abc" failed').to_json()
        assert read(line) == Printed(rank=0, text='GET "http://host/?token=***" failed')

    def test_a_run_that_is_refused_later_has_none(self) -> None:
        handle = tr.submit(counted, on="driver", gpus=4096, **QUIET)
        assert list(handle.events()) == []
        with pytest.raises(tr.errors.NotEnoughSlots):
            handle.result(30)


def test_what_is_no_session_is_refused_where_it_is_submitted() -> None:
    with pytest.raises(BadSetting, match="spark='x' is no SparkSession"):
        tr.submit(counted, spark="x", **QUIET)
    assert not run._unfinished


class TestListen:
    @pytest.mark.parametrize("on", PLACES)
    def test_to_every_run_of_the_block_and_to_no_other(self, on: str, tmp_path: Path) -> None:
        def train() -> None:
            tr.world().checkpoint.save({"x": 1}, step=1)

        heard: list[Event] = []
        with tr.listen(heard.append):
            tr.launch(train, on=on, run_dir=str(tmp_path / "a"), **QUIET)
            handle = tr.submit(counted, on=on, **QUIET)
        tr.launch(counted, on=on, **QUIET)
        handle.result(60)
        runs = {event.run for event in heard}
        assert len(runs) == 2
        assert handle.id in runs
        assert [event.step for event in heard if isinstance(event, CheckpointSaved)] == [1]
        assert sum(isinstance(event, RunEnded) for event in heard) == 2

    def test_blocks_can_be_nested(self) -> None:
        outer: list[str] = []
        inner: list[str] = []
        with tr.listen(lambda event: outer.append(event.run)):
            with tr.listen(lambda event: inner.append(event.run)):
                tr.launch(counted, on="here", **QUIET)
            tr.launch(counted, on="here", **QUIET)
        assert set(inner) < set(outer)
        assert len(set(outer)) == 2

    def test_what_a_callback_raises_is_said_once(self, tmp_path: Path) -> None:
        heard: list[Event] = []

        def fail(event: Event) -> None:
            raise OSError(REFUSED.partition(": ")[2])

        with tr.listen(fail), tr.listen(heard.append):
            assert tr.launch(counted, on="here", run_dir=str(tmp_path), **QUIET) == [0]
        notes = [event.text for event in heard if isinstance(event, Note)]
        (note,) = notes
        assert note == f"A callback of tritium.listen raised {REFUSED} (event 'run'; further ones are not shown)"

    def test_one_that_exits_leaves_the_others(self) -> None:
        heard: list[Event] = []
        with tr.listen(lambda _: sys.exit(2)), tr.listen(heard.append):
            assert tr.launch(counted, on="here", **QUIET) == [0]
        assert any(isinstance(event, RunEnded) for event in heard)
        assert ["raised SystemExit: 2" in event.text for event in heard if isinstance(event, Note)] == [True]

    def test_one_that_never_returns_does_not_hold_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "LISTEN_SECONDS", 0.05)
        go_on = threading.Event()
        with tr.listen(lambda _: go_on.wait(60)):
            assert tr.launch(counted, on="here", **QUIET) == [0]
        go_on.set()

    def test_an_estimator_is_heard(self) -> None:
        torch = pytest.importorskip("torch")
        import pandas as pd

        from tritium.ml import TorchEstimator

        heard: list[Event] = []
        frame = pd.DataFrame({"x": [0.0, 1.0, 2.0, 3.0], "y": [0.0, 1.0, 2.0, 3.0]})
        estimator = TorchEstimator(
            model=lambda: torch.nn.Linear(1, 1),
            loss=torch.nn.MSELoss(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            feature_cols=["x"],
            label_cols=["y"],
            epochs=2,
            on="here",
        )
        with tr.listen(heard.append):
            estimator.fit(frame)
        assert {event.epoch for event in heard if isinstance(event, Logged)} == {0, 1}

    @pytest.mark.processes
    def test_it_can_cancel(self, tmp_path: Path) -> None:
        handles: list[tr.Run] = []
        submitted = threading.Event()

        def stop(event: Event) -> None:
            if isinstance(event, GangFormed):
                submitted.wait(30)
                handles[0].cancel()

        with tr.listen(stop):
            handles.append(tr.submit(busy(tmp_path), on="driver", **QUIET))
            submitted.set()
        with pytest.raises(RunCancelled):
            handles[0].result(60)


@pytest.mark.processes
def test_warnings_are_those_of_the_code_that_asks_for_the_result(tmp_path: Path) -> None:
    def train() -> None:
        threading.Thread(target=lambda: 1 / 0).start()

    with pytest.warns(TritiumWarning, match="ZeroDivisionError") as caught:
        tr.launch(train, on="driver", **QUIET)
    assert {warning.filename for warning in caught} == {__file__}
    handle = tr.submit(train, on="driver", **QUIET)
    with pytest.warns(TritiumWarning, match="ZeroDivisionError") as caught:
        handle.result(60)
    assert {warning.filename for warning in caught} == {__file__}
    handle.result(60)


FORGOTTEN = """
import sys, time
from pathlib import Path
import tritium as tr

def train():
    import os
    Path(sys.argv[1], "part").write_text(str(os.getpid()))
    Path(sys.argv[1], "part").rename(Path(sys.argv[1], "pid"))
    time.sleep(600)

run = tr.submit(train, on="driver", run_dir=str(Path(sys.argv[1], "run")), progress=False)
while not Path(sys.argv[1], "pid").exists():
    time.sleep(0.01)
print("leaves")
"""


@pytest.mark.processes
def test_the_end_of_the_interpreter_cancels_what_goes_on(tmp_path: Path) -> None:
    program = FORGOTTEN.replace("sys.argv[1]", repr(str(tmp_path)))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "leaves\n"), done.stderr
    assert not done.stderr
    assert time.monotonic() - began < 30
    assert not alive(int((tmp_path / "pid").read_text()))
    report = tmp_path / "run/report.json"
    assert json.loads(report.read_text())["failure"]["type"].endswith("RunCancelled")


class Twice:
    """A launcher of another distribution: calls the function once for each rank, in this process."""

    def __init__(self, attempt: Any) -> None:
        self._attempt = attempt

    def start(self) -> None:
        self._attempt.recorder.event(GangFormed(peers=[{"rank": rank, "host": "b7"} for rank in (0, 1)]))

    def wait(self) -> list[Any]:
        return [self._attempt.function(*self._attempt.args) for _ in range(self._attempt.ranks)]

    def signal(self, number: int) -> bool:
        return False

    def interrupt(self) -> None: ...
    def cancel(self) -> None: ...


def test_another_distribution_adds_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "twice-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[tritium.launchers]\ntwice = {__name__}:Twice\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(next(iter(launcher.entry_points(group="tritium.launchers"))), EntryPoint)
    assert tr.launch(lambda x: x, on="twice", ranks=2, args=(5,), **QUIET) == [5, 5]
    with pytest.raises(BadSetting, match="on='trice' is unknown; choose one of 'cluster', 'driver', 'here', 'twice'"):
        tr.Gang(on="trice")
