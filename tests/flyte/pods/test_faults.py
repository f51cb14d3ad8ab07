"""A rank, an executor, a driver killed: the next attempt goes on, to the same weights as without Flyte and faults."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import clusters
from pods import Pod, pod
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


def test_a_killed_executor_and_more_memory(undisturbed: str, tmp_path: Path) -> None:
    """On a standalone cluster: the gang goes on after its executor was lost; after an OOM the next attempt has more."""
    place = Place(tmp_path)
    with clusters.standalone() as master:
        inputs = ("fault='executor'", f"marker={str(tmp_path / 'executor')!r}", "retries=2")
        ended = pod(place, "fit", *inputs, flow="training", master=master).run()
        assert ended.outputs is not None, f"{ended.error}\n{ended.log[-5000:]}"
        assert undisturbed in str(ended.outputs)
        assert (tmp_path / "executor").exists()
        assert "retry 1 of 2" in ended.report
        oom = f"marker={str(tmp_path / 'oom')!r}"
        first = pod(place, "wants_memory", oom, flow="training", master=master).run()
        assert first.error is not None, first.log[-5000:]
        facts = [first.error[name] for name in ("kind", "code", "origin")]
        assert facts == ["RECOVERABLE", "OOM", "USER"]
        second = pod(place, "wants_memory", oom, flow="training", master=master).run()
        assert second.outputs is not None, f"{second.error}\n{second.log[-5000:]}"
        assert "-Xmx640M" in str(second.outputs)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_killed_driver(undisturbed: str, end: signal.Signals, tmp_path: Path) -> None:
    """The next attempt's pod goes on from the checkpoint, and the report of the first is there."""
    place, marker = Place(tmp_path), tmp_path / "marker"
    inputs = ("fault='wait'", f"marker={str(marker)!r}", "retries=0")
    first = pod(place, "fit", *inputs, flow="training")
    hit(first, lambda: marker.exists() and "checkpoint" in report(first), end)
    assert "checkpoint" in report(first)
    second = pod(place, "fit", *inputs, flow="training").run()
    assert second.outputs is not None, f"{second.error}\n{second.log[-5000:]}"
    assert undisturbed in str(second.outputs)
    assert "resumed" in second.report


def report(attempt: Pod) -> str:
    path = Path(attempt.out, "report.html")
    return path.read_text() if path.exists() else ""


def hit(attempt: Pod, ready: Callable[[], bool], end: signal.Signals) -> None:
    """Send a signal to the pod's processes when all is ready, as a kubelet does to the first of them."""
    with attempt.start() as process:
        try:
            clusters.wait(lambda: ready() or process.poll() is not None, "the training waits", SECONDS)
            assert process.poll() is None, process.communicate()[0][-5000:]
            drivers = [
                child for child in psutil.Process(process.pid).children() if "runtime.py" in str(child.cmdline())
            ]
            for pid in [*(driver.pid for driver in drivers), process.pid]:
                os.kill(pid, end)
            process.communicate(timeout=SECONDS)
        finally:
            process.kill()


def test_all_of_it_in_an_object_store(undisturbed: str, tmp_path: Path) -> None:
    """The checkpoint that the next attempt goes on from, the model, the report: all on S3."""
    place = Place(tmp_path)
    inputs = ("fault='rank'", f"marker={str(tmp_path / 'marker')!r}")
    with s3() as server:
        where: dict[str, Any] = {"flow": "training", "store": "s3://bucket/flyte", **server}
        first = pod(place, "saved", *inputs, **where).run()
        assert first.error is not None, first.log[-5000:]
        facts = [first.error[name] for name in ("kind", "code", "origin")]
        assert facts == ["RECOVERABLE", "RankFailed", "SYSTEM"]
        assert "SIGKILL" in first.report
        second = pod(place, "saved", *inputs, **where).run()
        assert second.outputs is not None, f"{second.error}\n{second.log[-5000:]}"
        assert "resumed" in second.report
        uri = second.outputs["o0"]["scalar"]["blob"]["uri"]
        assert uri.startswith("s3://bucket/flyte/raw/")
        third = pod(place, "loaded", f"model=SavedModel(path={uri!r})", **where).run()
        assert third.outputs is not None, f"{third.error}\n{third.log[-5000:]}"
        assert undisturbed in str(third.outputs)


@contextlib.contextmanager
def s3() -> Iterator[dict[str, str]]:
    """Yield the variables by which Flyte's storage and fsspec find a real S3 server with a bucket."""
    port = clusters.free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    keys = {"ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any"}
    url = f"http://127.0.0.1:{port}"
    env = {f"{prefix}AWS_{name}": value for prefix in ("", "FLYTE_") for name, value in keys.items()}
    env |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_REGION": "us-east-1"}
    env |= {"AWS_ENDPOINT_URL": url, "FLYTE_AWS_ENDPOINT": url}
    make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            clusters.wait(lambda: clusters.listens(port) or process.poll() is not None, "the S3 server listens")
            subprocess.run([sys.executable, "-c", make], env={**os.environ, **env}, check=True, timeout=SECONDS)
            yield env
        finally:
            process.kill()


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
