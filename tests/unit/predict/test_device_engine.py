"""The engine process of a device, for which one of the CPU's is taken, and what its callers see."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import engines
import tritium as tr
from device_processes import end, plan_of, running
from tritium import ship
from tritium.errors import ModelError, WireError
from tritium.model.calls import CallState
from tritium.model.score import Scorer
from tritium.model.signature import Input, Output, Signature
from tritium.predict import device_engine, engine_process
from tritium.predict.array_channel import ArrayChannel, Raised
from tritium.predict.device_engine import connected, is_needed

SIGNATURE = Signature((Input("x", ("a", "b"), "float32", (2,)),), (Output("y"), Output("pid", dtype="int64")))
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="engine processes are for Linux")


class Odd(Exception):
    """Can be pickled, and not be unpickled."""

    def __init__(self, value: float, _needed: str) -> None:
        super().__init__(f"no {value:g}")


class Module(nn.Module):
    """Adds `more`, tells its process, writes where it was loaded, and refuses negative numbers."""

    def __init__(self, more: float, place: str) -> None:
        super().__init__()
        self.more, self.place = nn.Parameter(torch.tensor([more])), place

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        with open(self.place, "a") as file:
            file.write(f"{os.getpid()}\n")

    def forward(self, x: torch.Tensor) -> Any:
        if (x[:, 0] < 0).any():
            raise Odd(float(x[:, 0].min()), "")
        return x.sum(1) + self.more, torch.full((len(x),), os.getpid())


def plan(more: float, place: Path) -> tuple[dict[str, Any], Any]:
    return plan_of(tr.Model(Module(more, str(place)), SIGNATURE))


@pytest.fixture(autouse=True)
def _an_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test a directory as an executor has it, and end the processes that would wait for another task."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # ONNX Runtime writes a file of its own.
    yield
    end()


def rows(*numbers: float) -> dict[str, np.ndarray]:
    return {"x": np.array([[number, 0.5] for number in numbers], np.float32)}


def test_which_devices_have_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_needed("cuda")
    assert is_needed("cuda:1")
    assert not is_needed("cpu")
    assert not is_needed("cpu:0")
    monkeypatch.setenv(device_engine.PRETENDED, "cpu:0,cpu:1")
    assert is_needed("cpu:1")
    assert not is_needed("cpu")


@pytest.mark.parametrize(
    ("device", "gpus", "name"),
    [("cuda", ["3"], "cuda:3"), ("cuda:1", ["3"], "cuda:1"), ("gpu", [], "cuda:0"), ("cpu:1", [], "cpu:1")],
)
def test_the_process_is_that_of_the_task_s_own_device(device: str, gpus: list[str], name: str) -> None:
    assert device_engine._device(device, gpus) == name


def test_one_process_and_one_load_for_all_tasks_and_models(tmp_path: Path) -> None:
    loads = tmp_path / "loads"
    plans = [plan(more, loads) for more in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]  # More than stay when nobody uses them.
    together = threading.Barrier(4)

    def task(number: int) -> set[int]:
        seen: set[int] = set()
        together.wait()
        with connected(*plans[0], cpus=1, gpus=[]) as first, connected(*plans[1], cpus=1, gpus=[]) as second:
            for size in (1, 5000, 3):  # The shared memory grows, and the arrays are not overwritten by a later call.
                batch = rows(*range(number, number + size))
                results = [engine.call(batch, ["y", "pid"]) for engine in (first, second)]
                for more, result in zip((1.0, 2.0), results, strict=True):
                    np.testing.assert_array_equal(result["y"], batch["x"].sum(1) + more)
                    seen.update(result["pid"].tolist())
            together.wait()
            for other in plans[2:]:
                with connected(*other, cpus=1, gpus=[]) as engine:
                    seen.update(engine.call(rows(1), ["y", "pid"])["pid"].tolist())
        with connected(*plans[0], cpus=1, gpus=[]) as first:  # It was in use all the time.
            return seen | set(first.call(rows(1), ["y", "pid"])["pid"].tolist())

    with ThreadPoolExecutor(4) as pool:
        (pid,) = set().union(*pool.map(task, range(4)))
    assert pid != os.getpid()
    assert [process.pid for process in running()] == [pid]
    assert len(loads.read_text().split()) == len(plans)

    with connected(*plans[0], cpus=1, gpus=[]) as engine:
        with pytest.raises(Exception, match=r"^no -3") as caught:
            engine.call(rows(1, -3), ["y", "pid"])
        assert type(caught.value).__name__ == "Odd"
        assert "in forward" in "".join(getattr(caught.value, "__notes__", ["in forward"]))
        scored, failed = Scorer(engine, SIGNATURE, CallState(4), isolate=True).score(rows(1, 2, -3, 4, 5))
        assert failed == {2: "Odd: no -3"}
        assert scored["y"].tolist() == [2.5, 3.5, 5.5, 6.5]
    broken, sent = plan(1.0, loads)
    with pytest.raises(ModelError, match="nowhere"), connected({**broken, "engine": "nowhere"}, sent, cpus=1, gpus=[]):
        pass


def test_a_killed_process_is_an_error_and_the_next_task_starts_another(tmp_path: Path) -> None:
    one = plan(1.0, tmp_path / "loads")
    with connected(*one, cpus=1, gpus=[]) as engine:
        (pid,) = engine.call(rows(1), ["y", "pid"])["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WireError, match=rf"engine process of cpu:0 on \S+ \(pid {pid}\) was killed") as caught:
            Scorer(engine, SIGNATURE, CallState(4), isolate=True).score(rows(1, 2, 3))
        assert caught.value.retry
    with connected(*one, cpus=1, gpus=[]) as engine:
        assert engine.call(rows(1), ["y", "pid"])["pid"] != pid


def test_it_ends_when_nobody_has_called_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "IDLE_SECONDS", 0.1)
    name = f"\0tritium-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(name)
        listener.listen()
        client.connect(name)
        server = threading.Thread(target=engine_process._DeviceServer(listener).serve)
        server.start()
        assert int.from_bytes(client.recv(8), "big") == os.getpid()
        server.join(1)
        assert server.is_alive()  # It has a client, which is slow.
        client.close()
        server.join()


class Endless(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        threading.Event().wait()


def test_a_call_without_an_end_is_given_up_after_its_task_has_ended() -> None:
    """Else every other task would wait."""
    signature = Signature(SIGNATURE.inputs, (Output("y"),))
    program = (
        "import sys; from tritium.predict import engine_process as process; "
        "process._ABANDONED_SECONDS = 1; process.main(sys.argv[1])"
    )
    name = f"\0tritium-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(name)
        listener.listen()
        client.connect(name)
        order = json.dumps({"listener": listener.fileno(), "daemon": os.getpid(), "path": ship.importable()})
        command = [sys.executable, "-c", program, order]
        with subprocess.Popen(command, pass_fds=[listener.fileno()]) as process:
            client.recv(8)
            one, sent = plan_of(tr.Model(Endless(), signature))
            weights = os.memfd_create("weights")
            os.write(weights, b"".join(sent.value))
            channel = ArrayChannel.opened(client, weights)
            os.close(weights)
            channel.send((one, 1, []))
            assert channel.receive() is None
            channel.send((rows(1), ["y"]))
            channel.close()
            assert process.wait(60) == 1


def test_an_onnx_file() -> None:
    case = engines.case_of("onnx")
    batch = {"x": np.arange(8, dtype=np.float32).reshape(4, 2)}
    with connected(*plan_of(case.model()), cpus=1, gpus=[]) as engine:
        np.testing.assert_allclose(engine.call(batch, ["scores"])["scores"], case.scores(batch["x"]), rtol=1e-6)


def test_an_error_arrives_as_it_is() -> None:
    for error in (KeyError("a"), SystemExit(3), WireError("gone"), MemoryError()):
        again = Raised.of(error).error()
        assert (type(again), str(again)) == (type(error), str(error))
    again = Raised.of(Odd(2.0, "")).error()
    assert (type(again).__name__, str(again)) == ("Odd", "no 2")


def test_arrays_through_shared_memory() -> None:
    ours, theirs = socket.socketpair()
    channel = ArrayChannel.opened(ours, 0)
    other, extra = ArrayChannel.accepted(theirs)
    os.close(extra)
    sent = [
        np.arange(7, dtype=np.int8),
        np.empty((0, 3)),
        np.asfortranarray(np.ones((2, 3))),
        np.arange(9)[::2],
        "text",
    ]
    channel.send(sent)
    for before, after in zip(sent, other.receive(), strict=True):
        np.testing.assert_array_equal(before, after)
    channel.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()
