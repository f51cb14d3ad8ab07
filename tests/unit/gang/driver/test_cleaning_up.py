"""What ended a run is what is raised, also where cleaning up after it fails; and Ctrl-C is the run's own."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tritium.errors import BadSetting, JobFailed, NotEnoughSlots, StartTimeout
from tritium.events import Event
from tritium.gang.driver import launcher, on_cluster, outcome
from tritium.gang.driver.cancellation import Cancellation
from tritium.gang.driver.outcome import GivenBack, await_formed
from tritium.gang.driver.retry import finish
from tritium.gang.driver.run import attempted
from tritium.gang.settings import Gang


class Recorder:
    """A recorder that keeps its notes."""

    run_dir = "/runs/1"

    def __init__(self, newest: tuple[int, str] | None = None) -> None:
        self.notes: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.newest = newest

    def note(self, text: str) -> None:
        self.notes.append(text)

    def event(self, event: Event) -> None:
        self.events.append((event.kind, event.fields()))

    def drop_partial(self) -> None: ...


def attempt(**changes: Any) -> Any:
    def release() -> None:
        raise ConnectionRefusedError("the JVM is gone")

    gang = changes.pop("gang", Gang(ranks=2))
    facts = {"gang": gang, "function": len, "recorder": Recorder(), "release": release, "ranks": gang.most}
    facts["cancellation"] = Cancellation()
    return SimpleNamespace(**facts | changes)


def test_rows_that_can_not_be_given_back_hide_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Any) -> None:
        raise JobFailed("Spark's JVM was killed by SIGKILL", lost=False)

    monkeypatch.setattr(launcher, "run", run)
    lost = attempt()
    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        attempted(lost)
    assert "could not be given back: ConnectionRefusedError" in lost.recorder.notes[0]


def test_a_store_that_does_not_answer_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(run_dir: str) -> None:
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(on_cluster, "newest_checkpoint", unreachable)
    monkeypatch.setattr(on_cluster, "end_gang", lambda *_: None)
    runs = on_cluster.OnCluster.__new__(on_cluster.OnCluster)
    ended = attempt()
    runs.__dict__.update(
        _attempt=ended,
        _coordinator=SimpleNamespace(close=lambda: None, members={}),
        _cluster=SimpleNamespace(executors_reach_driver=False),
    )
    runs._end(SimpleNamespace(problem=JobFailed("lost", lost=True)))  # type: ignore[arg-type]
    assert "the checkpoints in /runs/1 can't be read: PermissionError" in ended.recorder.notes[0]


def test_too_few_slots_after_a_loss_say_what_was_lost_and_what_is_kept() -> None:
    error, recorder = NotEnoughSlots("2 ranks need 2 slots.", needed=2, available=1), Recorder((40, "/runs/1/40"))
    finish(error, recorder, ["Attempt 1: rank 1 was lost."])  # type: ignore[arg-type]
    for part in ("2 ranks need 2 slots", "Attempt 1: rank 1 was lost", "step 40, in /runs/1/40", 'run_dir="/runs/1"'):
        assert part in str(error)
    before = BadSetting("ranks=0 must be a whole number.")
    finish(before, Recorder())  # type: ignore[arg-type]
    assert str(before) == "ranks=0 must be a whole number."


@pytest.mark.parametrize(("where", "own"), [("cluster", True), ("driver", False)])
def test_ctrl_c_while_a_launch_waits_for_slots_is_that_launchs(
    where: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyspark's handler would cancel every job of the session."""
    seen: list[Any] = []

    class Waits:
        def __init__(self, _: Any) -> None:
            seen.append(signal.getsignal(signal.SIGINT))

        def start(self) -> None: ...
        def wait(self) -> list[Any]:
            return []

        def interrupt(self) -> None: ...
        def cancel(self) -> None: ...

    def pysparks(*_: Any) -> None: ...

    monkeypatch.setattr(launcher, "import_module", lambda _: SimpleNamespace(OnCluster=Waits, LocalProcesses=Waits))
    before = signal.signal(signal.SIGINT, pysparks)
    try:
        launcher.run(attempt(gang=Gang(on=where)))  # type: ignore[arg-type]
        assert seen == [signal.default_int_handler if own else pysparks]
        assert signal.getsignal(signal.SIGINT) is pysparks
    finally:
        signal.signal(signal.SIGINT, before)


def test_time_in_which_the_source_is_computed_does_not_count_when_slots_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcome, "LOOK_SECONDS", 0.01)
    computing = iter([True] * 5)
    tasks: Any = SimpleNamespace(
        ended=False, computing=lambda _: next(computing, False), source_stall=lambda _: None, silence=""
    )
    coordinator: Any = SimpleNamespace(changed=threading.Condition(), formed=False, failure=None, members={0: None})
    waits = attempt(gang=Gang(ranks=2, start_timeout=30.0))
    with pytest.raises(GivenBack, match="1 of 2 slots came") as caught:
        await_formed(coordinator, waits, tasks, waited=29.0, hold=0.2)
    assert caught.value.deadline > outcome.time.monotonic() + 20


def test_what_a_gang_waits_for_is_shown_soon_and_noted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK_SECONDS", 0.01), ("WAITING_SECONDS", 0.05), ("FIRST_WORD_SECONDS", 0.2)):
        monkeypatch.setattr(outcome, name, seconds)
    tasks: Any = SimpleNamespace(ended=False, computing=lambda _: False, silence="Spark starts Python")
    coordinator: Any = SimpleNamespace(
        changed=threading.Condition(), formed=False, failure=None, members={}, missing=lambda: [0, 1]
    )
    waits = attempt(gang=Gang(ranks=2, start_timeout=0.3))
    with pytest.raises(StartTimeout):
        await_formed(coordinator, waits, tasks)
    assert waits.recorder.events == [("waiting", {"text": "Spark starts Python"})]
    assert waits.recorder.notes == ["Spark starts Python"]
