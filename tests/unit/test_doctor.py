"""What `tritium doctor` says of the figures that a cluster's executors answer with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tritium import cli
from tritium.cli import judge, probe
from tritium.cli.doctor import _written

GB = 10**9
VERSIONS = {name: {"version": judge._version(name), "error": None} for name in judge.LIBRARIES}


def answer(executor: str = "a:1", **changes: Any) -> dict[str, Any]:
    """Return what the first task of a healthy executor answers, with changes."""
    healthy = {
        "executor": executor,
        "first": True,
        "resources": {},
        "java": "17.0.1",
        "python": [sys.version.split()[0], "/opt/python"],
        "libraries": VERSIONS,
        "cuda": {"built": None, "available": False, "devices": 0},
        "gpus": [],
        "shm": {"total": 8 * GB, "free": 8 * GB, "kind": "tmpfs", "writable": True},
        "dirs": {"/disk": {"total": 900 * GB, "free": 500 * GB, "kind": "ext4", "writable": True}},
        "memory": {"cgroup": 8 * GB, "address_space": None, "machine": 64 * GB},
        "driver": {"offset": 0.001, "within": 0.002},
        "file": None,
        "peers": {},
    }
    return healthy | changes


def library(name: str, version: str | None, error: str | None = None) -> dict[str, Any]:
    return {"libraries": {**VERSIONS, name: {"version": version, "error": error}}}


def disk(**changes: Any) -> dict[str, Any]:
    return {"dirs": {"/disk": {"total": 900 * GB, "free": 500 * GB, "kind": "ext4", "writable": True} | changes}}


def judged(sick: dict[str, Any], heap: int = GB) -> list[tuple[str, str, str]]:
    """Return (level, subject, result and fix) of what is wrong where one of two executors answers with `sick`."""
    answers = [answer("a:1"), answer("b:2", **sick)]
    findings = [
        judge.python(answers),
        *(judge.library(name, answers) for name in judge.LIBRARIES),
        *judge.accelerators(answers, answers, max(len(a["resources"].get("gpu", ())) for a in answers)),
        judge.shared_memory(answers),
        *judge.local_dirs(answers),
        judge.memory(answers, heap),
        *judge.route_to_driver(answers, True),
        *judge.routes(answers),
        *judge.run_dir(answers),
    ]
    return [(f.level, f.subject, f"{f.result} | {f.fix}") for f in findings if f.level != "ok"]


def test_healthy_executors_have_nothing_wrong() -> None:
    assert judged({}) == []


NO_CUDA = {"cuda": {"built": "12.8", "available": False, "devices": 0}, "resources": {"gpu": ["0"]}}
SMALL_SHM = {"total": 64 << 20, "free": 64 << 20, "kind": "tmpfs", "writable": True}
LIMITS = {"cgroup": None, "address_space": 2 * GB, "machine": 64 * GB}


@pytest.mark.parametrize(
    ("sick", "level", "subject", "says"),
    [
        ({"python": ["3.9.1", "/usr/bin/python3"]}, "error", "Spark's Python", "b:2: set PYSPARK_PYTHON"),
        (
            library("pyarrow", None, "ModuleNotFoundError"),
            "error",
            "pyarrow there",
            "in /opt/python, or PYSPARK_PYTHON",
        ),
        (library("torch", None, "ModuleNotFoundError"), "warning", "torch there", "only what uses it needs it"),
        (
            library("torch", "2.1", "OSError: libcudart"),
            "error",
            "torch there",
            "can't be imported: OSError: libcudart",
        ),
        (library("lzma", None, "ModuleNotFoundError"), "error", "lzma there", "a Python that was built with it"),
        (library("numpy", "1.26.4"), "warning", "numpy there", "1.26.4"),
        ({"gpus": ["H100, 580.1, 80 GB"], **NO_CUDA}, "error", "GPUs there", "b:2: torch is built for CUDA 12.8"),
        ({"gpus": ["H100, 580.1, 80 GB"], "cuda": None}, "warning", "GPUs of tasks", "Spark assigns none"),
        ({"shm": SMALL_SHM}, "warning", "/dev/shm", "67 MB and more | b:2: docker run --shm-size"),
        (disk(kind="tmpfs"), "warning", "local dirs", "/disk on b:2: is on a tmpfs"),
        (disk(free=GB), "warning", "local dirs", "1.0 GB free of 900.0 GB (ext4)"),
        (disk(writable=False), "error", "local dirs", "/disk on b:2: can't be written"),
        ({"memory": LIMITS}, "warning", "memory", "the address space of Python is limited to 2.0 GB"),
        ({"memory": {**LIMITS, "address_space": None, "cgroup": GB * 3 // 2}}, "warning", "memory", "500 MB are left"),
        ({"driver": {"error": "Connection refused"}}, "error", "route to driver", "b:2: Connection refused"),
        ({"driver": {"offset": -3.0, "within": 0.01}}, "warning", "clocks", "b:2 is +3,000 ms from the driver's"),
        ({"peers": {"a:1": "port 7: timed out"}}, "error", "between executors", "b:2 to a:1: port 7: timed out"),
        ({"file": False}, "warning", "run_dir there", "b:2: not the driver's directory"),
    ],
)
def test_what_is_wrong_is_named_with_its_executor_and_fix(
    sick: dict[str, Any], level: str, subject: str, says: str
) -> None:
    ((its_level, its_subject, text),) = judged(sick)
    assert (its_level, its_subject) == (level, subject)
    assert says in text


def test_over_connect_no_route_to_the_client_is_needed() -> None:
    (finding,) = judge.route_to_driver([answer(driver={"error": "timed out"})], False)
    assert finding.level == "warning"
    assert "come at the end" in finding.fix


@pytest.mark.parametrize(
    ("conf", "level", "says"),
    [
        ({}, None, ""),
        ({"spark.executor.pyspark.memory": "2g"}, "warning", "spark.executor.pyspark.memory=2g"),
        ({"spark.dynamicAllocation.enabled": "true"}, "warning", "ranks start one by one"),
        (
            {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.shuffleTracking.enabled": "false"},
            "error",
            "shuffled rows go with their executor",
        ),
    ],
)
def test_settings(conf: dict[str, str], level: str | None, says: str) -> None:
    findings = [check(lambda name, default="": str(conf.get(name, default))) for check in judge.SETTINGS]
    wrong = [finding for finding in findings if finding is not None]
    assert [finding.level for finding in wrong] == ([level] if level else [])
    assert all(says in finding.result for finding in wrong)


def test_a_run_dir_is_left_as_it_was(tmp_path: Path) -> None:
    with _written(f"{tmp_path}/new/run") as (findings, file):
        assert findings[0].level == "ok"
        assert file is not None
        assert Path(file).is_file()
    assert list(tmp_path.iterdir()) == []


def test_a_run_dir_in_a_file_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with _written(f"{tmp_path}/file/run") as (findings, file):
        assert findings[0].level == "error"
        assert "can't be written" in findings[0].result
        assert file is None


def test_the_probe_sees_this_machine() -> None:
    facts = probe._machine({"libraries": ["numpy", "no_such_module"], "driver": None, "file": __file__})
    assert facts["libraries"]["numpy"]["error"] is None
    assert facts["libraries"]["no_such_module"]["version"] is None
    assert "No module named" in facts["libraries"]["no_such_module"]["error"]
    assert facts["memory"]["machine"] > 1 << 28
    assert facts["file"] is True


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="only Linux has /dev/shm")
def test_the_probe_knows_a_tmpfs() -> None:
    space = probe._space("/dev/shm")
    assert space is not None
    assert space["kind"] == "tmpfs"
    assert probe._file_system("/proc") == "proc"


def test_master_and_remote_exclude_each_other() -> None:
    result = CliRunner().invoke(cli.main, ["doctor", "--master", "local", "--remote", "sc://h"])
    assert result.exit_code == 2
    assert "exclude each other" in result.output
