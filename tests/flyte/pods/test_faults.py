"""A rank, an executor, a driver killed: the next attempt goes on, to the same weights as without Flyte and faults."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import clusters
from pods import Pod, finish, pod
from workflows import FOLDER, SECONDS, Place

FLOW = FOLDER / "training.py"
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the weights of the training without Flyte."""
    place = Place(tmp_path_factory.mktemp("without"))
    command = [sys.executable, str(FLOW), str(place.folder / "run")]
    done = subprocess.run(
        command, env=place.environment(), cwd=place.folder, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    found = re.search(r"WEIGHTS (\w+)", done.stdout)
    assert found, done.stdout + done.stderr[-3000:]
    return found[1]


def test_a_killed_rank_and_two_gangs_at_once(undisturbed: str, tmp_path: Path) -> None:
    """The second attempt of Flyte goes on from a checkpoint; two gangs take turns for the slots."""
    place, marker = Place(tmp_path), str(tmp_path / "marker")
    calls = [("through_a_model", ["'rank'", repr(marker)]), ("two_gangs", [])]
    played = place.play(FLOW, calls)
    assert played.outputs(0)[0]["weights"] == undisturbed
    assert Path(marker).exists()
    assert ("training.saved", False, 2) in place.runs()
    total = float(sum(number % 17 for number in range(240)))
    assert played.outputs(1) == [[total, 2 * total]]
    assert any("resumed" in report for report in place.reports())


def test_a_killed_executor(undisturbed: str, tmp_path: Path) -> None:
    """On a standalone cluster, in one pod: the gang goes on after its executor was lost."""
    place = Place(tmp_path)
    with clusters.standalone() as master:
        inputs = ("fault='executor'", f"marker={str(tmp_path / 'executor')!r}", "retries=2")
        ended = pod(place, "fit", *inputs, flow="training", master=master).run()
        assert ended.outputs is not None, f"{ended.error}\n{ended.log[-5000:]}"
        assert undisturbed in str(ended.outputs)
        assert (tmp_path / "executor").exists()
        assert "retry 1 of 2" in ended.report


def test_more_memory_after_one_that_ran_out_of_it(tmp_path: Path) -> None:
    """On a standalone cluster: the executors of the next attempt's pod have a larger heap, that of their process."""
    place = Place(tmp_path)
    with clusters.standalone() as master:
        first, second = (
            pod(place, "wants_memory", f"marker={str(tmp_path / 'oom')!r}", flow="training", master=master).run()
            for _ in range(2)
        )
    assert first.error is not None, first.log[-5000:]
    facts = [first.error[name] for name in ("kind", "code", "origin")]
    assert facts == ["RECOVERABLE", "OOM", "USER"], first.error["message"]
    assert second.outputs is not None, f"{second.error}\n{second.log[-5000:]}"
    assert "-Xmx640M" in str(second.outputs)  # 1.25 of the 512 MiB that the application asks for


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_driver(undisturbed: str, tmp_path: Path, number: signal.Signals) -> None:
    """The next attempt's pod goes on from the checkpoint, and the report of the first is there."""
    place, marker = Place(tmp_path), tmp_path / "marker"
    inputs = ("fault='wait'", f"marker={str(marker)!r}", "retries=0")
    first = pod(place, "fit", *inputs, flow="training")
    hit(first, number, lambda: marker.exists() and "checkpoint" in report(first))
    assert "checkpoint" in report(first)
    second = pod(place, "fit", *inputs, flow="training").run()
    assert second.outputs is not None, f"{second.error}\n{second.log[-5000:]}"
    assert undisturbed in str(second.outputs)
    assert "resumed" in second.report


def report(attempt: Pod) -> str:
    path = Path(attempt.out, "report.html")
    return path.read_text() if path.exists() else ""


def hit(attempt: Pod, number: signal.Signals, ready: Callable[[], bool]) -> None:
    """End the pod when all is ready as Kubernetes does: its first process by a signal, the others with that one."""
    process = attempt.start()
    try:
        clusters.wait(lambda: ready() or process.poll() is not None, "the training waits", SECONDS)
        runs = process.poll() is None
        process.send_signal(number)
        process.wait(SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):  # All may have ended with the first one.
            os.killpg(process.pid, signal.SIGKILL)
        log = finish(process)
    assert runs, log[-5000:]


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """A local run that is interrupted ends with all its ranks; the fixture looks for processes."""
    place, marker = Place(tmp_path), tmp_path / "marker"
    calls = [("fit", ["'wait'", repr(str(marker)), "0"])]
    with place.start(FLOW, calls) as process:
        try:
            clusters.wait(
                lambda: (marker.exists() and shown(place)) or process.poll() is not None, "the training waits", SECONDS
            )
            process.send_signal(signal.SIGINT)
            text, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0, text
    assert marker.exists(), text
    assert shown(place)


def shown(place: Place) -> bool:
    return any("checkpoint" in page for page in place.reports())
