"""Processes of Spark's own that are no leaks, and leaks that must not hide among them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import leaks


def test_a_child_of_a_spark_worker_is_seen(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that outlives its task hangs below a Python worker; workers and daemon themselves are Spark's."""
    monkeypatch.setattr(leaks, "SECONDS", 0.0)
    before = leaks.Trace.now(set())
    notice = str(tmp_path / "pid")

    def leave_a_child(batches: Any) -> Any:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        Path(notice).write_text(str(child.pid))
        child.returncode = 0  # nobody waits for it
        yield from batches

    spark.range(0, 1, 1, 1).mapInArrow(leave_a_child, "id long").collect()
    pid = int(Path(notice).read_text())
    try:
        found = before.left(set())
    finally:
        psutil.Process(pid).kill()
    assert len(found) == 1
    assert found[0].startswith(f"process {pid}: {sys.executable} -c import time")
    monkeypatch.setattr(leaks, "SECONDS", 5.0)
    assert before.left(set()) == []
