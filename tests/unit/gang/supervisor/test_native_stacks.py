"""The stacks of a process by py-spy, and the reasons why there are none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tritium.gang.supervisor.native_stacks import find_spy, native_stacks

needs_spy = pytest.mark.skipif(find_spy([]) is None, reason="py-spy is not installed")


def spy() -> str:
    path = find_spy([])
    assert path is not None
    return path


@pytest.fixture
def waiting() -> Iterator[int]:
    """Yield the pid of a Python process that waits in a C function."""
    code = "import ctypes; print('there', flush=True); ctypes.CDLL(None).pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        yield process.pid
        process.kill()


def may_trace(text: str) -> None:
    if "Permission" in text or "not permitted" in text:
        pytest.skip(f"this system lets no process trace another: {text}")


@needs_spy
def test_the_c_function_in_which_a_process_waits(waiting: int) -> None:
    text = native_stacks(spy(), waiting, 60.0)
    may_trace(text)
    first, empty, thread, *frames = text.splitlines()
    assert (first, empty) == ("Native stacks, by py-spy:", "")
    assert thread.startswith(f"Thread {waiting} ")
    assert [line for line in frames if "pause" in line]
    assert "ctypes.CDLL" not in text, "the command line, which may be long"


@needs_spy
def test_one_that_takes_longer_is_not_waited_for(waiting: int) -> None:
    assert native_stacks(spy(), waiting, 0.0) == "py-spy gave no native stacks in 0.0 s.\n"


@needs_spy
def test_a_process_without_python() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        text = native_stacks(spy(), process.pid, 60.0)
        process.kill()
    assert text.startswith("py-spy gave no native stacks: ")


def test_a_program_that_is_no_py_spy(tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_bytes(b"")
    program.chmod(0o755)
    assert native_stacks(str(program), 1, 60.0).startswith("py-spy gave no native stacks: ")


def test_where_py_spy_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_spy([str(tmp_path / "packages")]) is None
    for folder in ("path", "scripts", "packages"):
        program = tmp_path / folder / "py-spy"
        program.parent.mkdir()
        program.write_bytes(b"")
        program.chmod(0o755)
        assert find_spy([str(tmp_path / "packages")]) == str(program)
