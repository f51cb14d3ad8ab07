"""The fixtures themselves: each kind of cluster runs a job, in JVMs that use the class archive."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import class_archive
from clusters import KINDS


def test_each_kind_of_cluster_runs_a_job(cluster: Any) -> None:
    rows = cluster.spark.range(0, 100, 1, 4).mapInArrow(lambda batches: batches, "id long").collect()
    assert sorted(row.id for row in rows) == list(range(100))


@pytest.mark.parametrize("cluster", KINDS, indirect=True)  # Hadoop's have another class path
@pytest.mark.skipif(sys.platform != "linux", reason="a process's mapped files are read from /proc")
def test_every_jvm_maps_the_class_archive(cluster: Any) -> None:
    archive = class_archive.path()
    assert archive is not None
    cluster.spark.range(4).mapInArrow(lambda batches: batches, "id long").collect()  # there are executors
    started = psutil.Process().children(recursive=True)
    jvms = {process.pid: process.cmdline() for process in started if process.name() == "java"}
    assert jvms
    for pid, command in jvms.items():
        assert archive.name in Path(f"/proc/{pid}/maps").read_text(), " ".join(command)
