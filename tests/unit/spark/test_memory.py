"""The memory beside Java's heap that an executor has on each kind of cluster, and the note where it is too little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tritium.errors import BadSetting
from tritium.spark.cluster.kubernetes import Kubernetes
from tritium.spark.cluster.local import Local
from tritium.spark.cluster.standalone import Standalone
from tritium.spark.cluster.yarn import Yarn
from tritium.spark.memory import check_workers, granted, notes, size_of
from tritium.spark.session import Session

MEMORY, OVERHEAD = "spark.executor.memory", "spark.executor.memoryOverhead"
FACTOR, LEAST = "spark.executor.memoryOverheadFactor", "spark.executor.minMemoryOverhead"
WORKER, CORES = "spark.executor.pyspark.memory", "spark.executor.cores"
IN_POD = {"spark.kubernetes.submitInDriver": "true"}


def session(settings: dict[str, str]) -> Session:
    return Session(SimpleNamespace(conf=settings))


@pytest.mark.parametrize(
    ("kind", "settings", "mib"),
    [
        (Yarn, {}, 384),
        (Yarn, {MEMORY: "8g"}, 819),
        (Yarn, {MEMORY: "8g", FACTOR: "0.25"}, 2048),
        (Yarn, {MEMORY: "1g", LEAST: "1g"}, 1024),
        (Yarn, {MEMORY: "8g", FACTOR: "0.25", OVERHEAD: "512"}, 512),
        (Kubernetes, {MEMORY: "1g"}, 384),
        (Kubernetes, {MEMORY: "2g", **IN_POD}, 819),
        (Kubernetes, {MEMORY: "2g", **IN_POD, "spark.kubernetes.memoryOverheadFactor": "0.5"}, 1024),
        (Kubernetes, {MEMORY: "2g", OVERHEAD: "3g", **IN_POD}, 3072),
    ],
)
def test_what_an_executor_has_beside_its_heap(
    kind: type[Yarn | Kubernetes], settings: dict[str, str], mib: int
) -> None:
    assert granted(session(settings), kind.overhead_factors)[0] >> 20 == mib


def test_too_little_for_the_ranks_is_said_with_the_setting_to_write() -> None:
    (note,) = notes(session({MEMORY: "4g"}), Yarn.overhead_factors, 2)
    assert "409 MB beside Java's heap (10% of spark.executor.memory, at least 384m)" in note
    assert "2 rank(s) with torch take 1100 MB and more" in note
    assert "Set it before the session: spark.executor.memoryOverhead=1100m or more" in note
    assert list(notes(session({OVERHEAD: "1100m"}), Yarn.overhead_factors, 2)) == []


@pytest.mark.parametrize("kind", [Standalone, Local])
def test_where_nothing_limits_an_executor_nothing_is_said(kind: type[Standalone | Local]) -> None:
    assert list(notes(session({}), kind.overhead_factors, 8)) == []


@pytest.mark.parametrize("settings", [{WORKER: "300m"}, {WORKER: "1g", CORES: "4"}])
def test_a_limit_with_which_no_worker_starts_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(BadSetting, match=r"each Python worker to (300|256) MB.*Start the session without") as caught:
        check_workers(session(settings))
    assert caught.value.setting == WORKER


@pytest.mark.parametrize("settings", [{}, {WORKER: "0"}, {WORKER: "3g"}, {WORKER: "4g", CORES: "4"}])
def test_a_limit_with_which_workers_start_is_let_pass(settings: dict[str, str]) -> None:
    check_workers(session(settings))


@pytest.mark.parametrize(("text", "size"), [("4g", 4 << 30), ("512m", 512 << 20), ("2048", 2 << 30), ("1KB", 1024)])
def test_sizes_of_spark(text: str, size: int) -> None:
    assert size_of(text) == size
