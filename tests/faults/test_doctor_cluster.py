"""`tritium doctor` on clusters of its own: a healthy one behind Connect, and one with several faults at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters import COMMON, connect_server

TRITIUM = str(Path(sys.executable).parent / "tritium")


def doctor(*options: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and subject → finding; of several with one subject, the worst."""
    command = [TRITIUM, "doctor", "--json", *options]
    answer = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200, check=False
    )
    assert answer.stdout.startswith("{"), answer.stderr[-3000:]
    findings = json.loads(answer.stdout)["findings"]
    order = ("ok", "warning", "error")
    return answer.returncode, {f["subject"]: f for f in sorted(findings, key=lambda f: order.index(f["level"]))}


@pytest.fixture
def memory_disk() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tritium-doctor-", dir="/dev/shm") as folder:
        yield folder


@pytest.fixture
def _no_folder_of_spark() -> Iterator[None]:
    from pyspark.find_spark_home import _find_spark_home

    work = Path(_find_spark_home(), "work")
    before = set(work.glob("app-*"))
    yield
    for folder in set(work.glob("app-*")) - before:  # Of this test's local-cluster, which Spark leaves.
        shutil.rmtree(folder)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="only Linux has /dev/shm")
@pytest.mark.usefixtures("_no_folder_of_spark")
def test_each_fault_of_a_cluster_is_named(tmp_path: Path, memory_disk: str) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    (tmp_path / "file").touch()
    faults = {
        "spark.executor.pyspark.memory": "3g",
        "spark.executorEnv.PYTHONPATH": str(tmp_path),
        "spark.tritium.driver.host": "127.0.0.1",
        "spark.tritium.driver.bindAddress": "127.0.0.2",  # Executors are told the other, where nothing listens.
    }
    conf = [word for key, value in {**COMMON, **faults}.items() for word in ("--conf", f"{key}={value}")]
    run_dir = f"{tmp_path}/file/run"
    code, findings = doctor(
        "--master", "local-cluster[2,1,1024]", *conf, "--run-dir", run_dir, SPARK_LOCAL_DIRS=memory_disk
    )
    assert code == 1
    levels = {subject: finding["level"] for subject, finding in findings.items() if finding["level"] != "ok"}
    assert levels == {
        "settings": "warning",
        "memory": "warning",
        "local dirs": "warning",
        "torch there": "error",
        "route to driver": "error",
        "run_dir": "error",
    }
    assert "limited to 3.2 GB" in findings["memory"]["result"]
    assert "libcudart.so.12" in findings["torch there"]["result"]
    assert findings["torch there"]["fix"].startswith("all executors: ")
    assert "Connection refused" in findings["route to driver"]["result"]
    assert findings["slots"]["result"].startswith("2 on 2 executor(s)")
    assert int(findings["Java there"]["result"].partition(".")[0]) >= 17
    assert findings["between executors"]["result"] == "2 connections, all open"


def test_behind_connect(tmp_path: Path) -> None:
    with connect_server() as url:
        code, findings = doctor("--remote", url, "--run-dir", str(tmp_path))
    assert code == 0, findings
    assert findings["slots"]["result"].startswith("2 on 1 executor(s)")
    assert findings["run_dir there"]["level"] == "ok"


def test_another_python_is_named(tmp_path: Path) -> None:
    """A worker that is no Python at all: the job fails, and what it needs is said."""
    conf = [word for key, value in COMMON.items() for word in ("--conf", f"{key}={value}")]
    python = str(tmp_path / "python")
    code, findings = doctor("--master", "local[2]", *conf, PYSPARK_PYTHON=python, PYSPARK_DRIVER_PYTHON=sys.executable)
    assert code == 1
    assert python in findings["executors"]["result"]
    assert findings["executors"]["fix"].startswith("PYSPARK_PYTHON must name")
