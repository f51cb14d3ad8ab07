"""The Python of Spark's workers on a local master: this one where none was chosen, else the chosen one, checked."""

from __future__ import annotations

import sys
import threading
import venv
from pathlib import Path

import pytest

from tritium.cli import findings
from tritium.errors import WrongVersion
from tritium.spark.python import check, drivers_python, on_this_machine


class Session:
    def __init__(self, python: str, master: str) -> None:
        self.sparkContext = self
        self.pythonExec, self.master = python, master


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Python without packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


@pytest.mark.parametrize("master", ["local", "local[2]", "local-cluster[2,1,1024]"])
def test_where_none_was_chosen_it_is_the_drivers(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    session = Session("python3", master)
    with drivers_python(session):
        assert session.pythonExec == sys.executable
    assert session.pythonExec == "python3"  # the session stays as it was


def test_two_launches_at_once_have_it_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    session, coming, left, seen = Session("python3", "local[2]"), threading.Event(), threading.Event(), list[str]()

    def second() -> None:
        coming.set()
        with drivers_python(session):
            left.wait(10)
            seen.append(session.pythonExec)

    thread = threading.Thread(target=second)
    with drivers_python(session):
        thread.start()
        coming.wait(10)
        thread.join(0.1)  # it would be in its block by now
    left.set()
    thread.join()
    assert (seen, session.pythonExec) == ([sys.executable], "python3")


def test_one_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    for session in (Session("/opt/python", "local[2]"), Session("python3", "spark://host:7077")):
        before = session.pythonExec
        with drivers_python(session):
            assert session.pythonExec == before
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")
    chosen = Session("python3", "local[2]")
    with drivers_python(chosen):
        assert chosen.pythonExec == "python3"
    assert not on_this_machine("yarn")


def test_one_that_lacks_what_workers_need_is_named_with_what_to_set(bare: str) -> None:
    check(sys.executable)
    with pytest.raises(WrongVersion, match=r"lacks 'pyarrow' and 'numpy'") as caught:
        check(bare)
    assert f"Set PYSPARK_PYTHON={sys.executable}, this driver's own, before the session is made" in str(caught.value)
    with pytest.raises(WrongVersion, match=r"can't be run|lacks"):
        check(str(Path(sys.executable).with_name("pip")))  # not every program beside it is the driver's own
    with pytest.raises(WrongVersion, match=r"/no/python \(PYSPARK_PYTHON\), is not there"):
        check("/no/python")


def test_one_that_cant_be_run(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(WrongVersion, match=r"can't be run: .*exit status 3"):
        check(str(program))


def test_doctor_says_which_it_is(bare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", bare)
    found = findings.workers()
    assert found.result == bare
    assert "lacks 'pyarrow' and 'numpy'" in found.fix
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert findings.workers() == findings.Finding("Spark's Python", f"{sys.executable} (PYSPARK_PYTHON)")
    monkeypatch.delenv("PYSPARK_PYTHON")
    monkeypatch.setenv("PATH", str(Path(bare).parent))
    assert findings.workers().fix == ""
    assert f"UDFs of your own run {bare}3, unless PYSPARK_PYTHON={sys.executable}" in findings.workers().result
